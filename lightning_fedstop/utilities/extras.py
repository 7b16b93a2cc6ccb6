"""Packages that are installed on request only."""

from importlib.util import find_spec


def require_extra(package: str, extra: str, user: str) -> None:
    """Refuse to go on without a package of an extra.

    Args:
        package: name under which it is imported.
        extra: extra of this package that installs it.
        user: what needs it, for the message.

    Raises:
        ModuleNotFoundError: with the command that installs the extra.

    >>> require_extra("json", "report", "`fedstop report`")
    """
    try:
        found = find_spec(package) is not None
    except ValueError:  # it is imported, as a module without a spec
        found = True
    if not found:
        raise ModuleNotFoundError(
            f'{user} needs {package}, which is not installed: `pip install "lightning-fedstop[{extra}]"`.'
        )
