"""Declarations of thread safety: clients are trained in threads where module and data declare it."""


def declares_thread_safety(owner: object) -> bool:
    """Check for ``is_thread_safe`` in an object's own class; an inherited declaration does not count.

    A class attribute answers for all instances, a property for the one that is asked.

    >>> class Safe:
    ...     is_thread_safe = True
    >>> class Changed(Safe):
    ...     pass
    >>> declares_thread_safety(Safe()), declares_thread_safety(Changed())
    (True, False)
    """
    return "is_thread_safe" in vars(type(owner)) and bool(getattr(owner, "is_thread_safe", False))
