"""``python -m lightning_fedstop`` is the ``fedstop`` command."""

from lightning_fedstop.cli.main import main

if __name__ == "__main__":
    main()
