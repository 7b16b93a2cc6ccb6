"""One sentence for an exception about what the user gave."""

import traceback

# Also loaded by the commands that load neither torch nor Lightning.
_OWN_FOLDERS = ("/lightning_fedstop/", "/lightning/pytorch/callbacks/")
_USUAL = (ValueError, TypeError, OSError, RuntimeError, ImportError, MemoryError)


def user_sentence(error: Exception) -> str | None:
    """Sentence for an error in what the user gave, or ``None``, which keeps the traceback.

    Such errors are: what model, data, callbacks or loop refuse while they are built, what fails while data or modules
    are set up, and what this package or Lightning refuses with a sentence later on.
    """
    while str(error).startswith("Call to compute_fn of link") and isinstance(error.__cause__, Exception):
        error = error.__cause__
    key, owner = getattr(error, "config_place", ("", ""))
    is_usage = type(error).__name__ == "MisconfigurationException"
    is_usual = is_usage or isinstance(error, _USUAL)
    frames = traceback.extract_tb(error.__traceback__)
    names = {frame.name for frame in frames}
    is_early = "_run_subcommand" not in names or names & {"setup", "prepare_data"}
    if not ((is_usual or key) and (is_early or is_usage or _is_raised_by_us(frames))):
        return None
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        text = f"{error.strerror}: {error.filename!r}"
    else:
        text = _one_line(str(error)) or type(error).__name__
    if not is_usual and not text.startswith(type(error).__name__):
        text = f"{type(error).__name__}: {text}"
    prefix = f"{owner}: " if owner and not text.startswith(owner) else ""
    where = f"{key}: " if key and not text.startswith(f"{key}.") else ""
    notes = "".join(f" {_one_line(note)}" for note in getattr(error, "__notes__", []))
    return f"{where}{prefix}{text}{'' if text.endswith(('.', '!', '?')) else '.'}{notes}"


def _is_raised_by_us(frames: traceback.StackSummary) -> bool:
    """Test for a ``raise`` of this package or Lightning's callbacks at the end: a refusal, no mistake."""
    last = frames[-1] if frames else None
    if last is None or not any(folder in last.filename.replace("\\", "/") for folder in _OWN_FOLDERS):
        return False
    return (last.line or "").startswith("raise ")


def _one_line(text: str) -> str:
    return " ".join(text.split())
