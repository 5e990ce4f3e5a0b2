"""What the kernel knows of a TCP connection."""

import asyncio
import struct
from fcntl import ioctl
from termios import TIOCOUTQ


def unacknowledged(transport: asyncio.Transport) -> int:
    """Bytes written to a connected transport that the other side's kernel has not acknowledged.

    0 where the system does not tell (it is not Linux).
    """
    fd = transport.get_extra_info("socket").fileno()
    try:
        # On a socket, this is SIOCOUTQ of tcp(7).
        (in_kernel,) = struct.unpack("i", ioctl(fd, TIOCOUTQ, bytes(4)))
    except OSError:
        return 0
    return int(in_kernel) + transport.get_write_buffer_size()
