"""How many bytes a WebSocket message costs on the wire, without asking the WebSocket library for its internals.

The model is RFC 6455 framing around RFC 7692 permessage-deflate with context take-over at zlib's fastest level, which
is what aiohttp sends in both directions; a test compares it with the bytes that cross a socket. TCP and TLS are left
out, as in docs/protocol.md.
"""

from __future__ import annotations

import zlib

_TRAILER = b"\x00\x00\xff\xff"
_MASK_BYTES = 4


class FrameMeter:
    """Sizes of the messages of one direction of one connection, fed in the order in which they are sent."""

    def __init__(self, *, deflate: bool, masked: bool) -> None:
        self._masked = masked
        self._deflate = zlib.compressobj(zlib.Z_BEST_SPEED, zlib.DEFLATED, -zlib.MAX_WBITS) if deflate else None

    def size(self, payload: bytes) -> int:
        """Bytes of the frame that carries `payload`; changes the compression context, so call it once a message."""
        length = len(payload)
        if self._deflate is not None:
            packed = self._deflate.compress(payload) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
            length = len(packed.removesuffix(_TRAILER))
        header = 2 if length < 126 else 4 if length < 65536 else 10
        return header + length + (_MASK_BYTES if self._masked else 0)
