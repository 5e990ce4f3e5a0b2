"""An input in pieces, as a network may deliver it."""


def in_pieces(size: int, data: bytes) -> list[bytes]:
    """`data` in pieces of `size` bytes; 0: in one."""
    step = size or max(1, len(data))
    return [data[at : at + step] for at in range(0, len(data), step)]
