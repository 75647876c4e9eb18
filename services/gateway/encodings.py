"""Bodies that a client compressed. Pure. The server's own decoding is off (paceline.health.listening): it answers a
damaged body as if the gateway were at fault, or outside OpenAI's format."""

from __future__ import annotations

import zlib

from paceline.errors import BadRequest, TooLarge

_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS


def decoded(data: bytes, encoding: str, limit: int) -> bytes:
    """`data` without its Content-Encoding, never more than `limit` bytes made. Raises BadRequest, TooLarge."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return data
    if name not in ("gzip", "x-gzip", "deflate"):
        message = f"the content encoding {encoding!r} is not supported; gzip, deflate and identity are"
        raise BadRequest(message, code="unsupported_encoding")
    try:
        return _inflated(data, _GZIP if name != "deflate" else _deflate_format(data), limit)
    except zlib.error as error:
        raise BadRequest(f"the body is not {name}: {error}", code="invalid_encoding") from error


def _deflate_format(data: bytes) -> int:
    """Some clients send raw deflate where RFC 9110 wants the zlib format, whose first byte has 8 in its low bits."""
    return _ZLIB if data[:1] and data[0] & 15 == zlib.DEFLATED else _RAW


def _inflated(data: bytes, window: int, limit: int) -> bytes:
    """One member: what follows it is as damaged as what is cut short."""
    stream = zlib.decompressobj(window)
    made = stream.decompress(data, limit + 1)
    if len(made) > limit:
        raise TooLarge(f"a body of more than {limit} bytes is over the limit of {limit} bytes")
    if not stream.eof:
        raise zlib.error("it is cut short")
    if stream.unused_data:
        raise zlib.error("bytes follow its end")
    return made
