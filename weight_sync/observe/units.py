"""Numbers as people read them. Decimal units everywhere (1 GB = 10^9 bytes), as links and wires are sold."""

from __future__ import annotations

GB = 1e9


def bytes_text(nbytes: float) -> str:
    """Three or four significant digits: "512 B", "1.5 MB", "61.06 GB"."""
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    size = float(nbytes)
    for unit in ("KB", "MB", "GB"):
        size /= 1000
        if size < 999.995:
            return f"{size:.2f} {unit}"
    return f"{size / 1000:.2f} TB"


def seconds_text(seconds: float) -> str:
    """Milliseconds below one second: "3.2 ms", "1.250 s"."""
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def rate_text(bytes_per_second: float) -> str:
    return f"{bytes_text(bytes_per_second)}/s"
