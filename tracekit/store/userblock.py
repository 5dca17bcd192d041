"""The user block: 512 bytes that say what the file is, checked before libhdf5 sees it."""

import hashlib
import struct
from dataclasses import dataclass

import xxhash

from tracekit.errors import TraceTooNew
from tracekit.store.limits import FORMAT, MAX_HEAD, USER_BLOCK
from tracekit.store.rules import corrupt

MAGIC = b"\x93TKT\r\n\x1a\n"
_FIELDS = struct.Struct("<8sHHIQQ32s32s32s")
_SEALED = USER_BLOCK - 16


@dataclass(frozen=True)
class UserBlock:
    """The facts of a user block.

    Args:
        length: bytes of the whole file.
        head: bytes of the head, which follows the user block.
        head_digest: SHA-256 of the head.
        payload_digest: SHA-256 of what follows the head.
        content_digest: SHA-256 of what the calls say.
        version: format, major and minor.
    """

    length: int
    head: int
    head_digest: bytes
    payload_digest: bytes
    content_digest: bytes
    version: tuple[int, int] = FORMAT

    def pack(self) -> bytes:
        """Return the 512 bytes, sealed with their own digest."""
        fields = _FIELDS.pack(
            MAGIC,
            *self.version,
            0,
            self.length,
            self.head,
            self.head_digest,
            self.payload_digest,
            self.content_digest,
        )
        body = fields.ljust(_SEALED, b"\0")
        return body + xxhash.xxh3_128_digest(body)

    @property
    def file_digest(self) -> str:
        """SHA-256 of the user block, hexadecimal; it pins the file, as the block holds the other digests."""
        return hashlib.sha256(self.pack()).hexdigest()


def parse_user_block(block: bytes, file_length: int) -> UserBlock:
    """Parse the first 512 bytes of a file.

    Args:
        block: the first bytes of the file, 512 where it has as many.
        file_length: how long the file is.

    Raises:
        TraceTooNew: E-02, another format version.
        TraceCorrupt: E-01, E-03, E-04, E-05.
    """
    if len(block) < USER_BLOCK or block[: len(MAGIC)] != MAGIC:
        raise corrupt("E-01", "This is not a trace: it does not start with a trace's user block.")
    _, major, minor, zero, length, head, head_digest, payload, content = _FIELDS.unpack_from(block)
    if xxhash.xxh3_128_digest(block[:_SEALED]) != block[_SEALED:USER_BLOCK]:
        raise corrupt("E-03", "The user block does not have its own digest; it was damaged.")
    if (major, minor) != FORMAT:
        raise TraceTooNew(
            f"The trace has format {major}.{minor} and this tracekit reads {FORMAT[0]}.{FORMAT[1]}; "
            "install the tracekit that wrote it, or record it again.",
            rule="E-02",
            format=f"{major}.{minor}",
            reads=f"{FORMAT[0]}.{FORMAT[1]}",
        )
    if zero or any(block[_FIELDS.size : _SEALED]):
        raise corrupt("E-03", "A reserved byte of the user block is not zero.")
    if length != file_length:
        raise corrupt(
            "E-04",
            f"The file is {file_length} bytes long and says {length}; it was cut or appended to.",
            length=file_length,
            stated=length,
        )
    if not 0 < head <= min(MAX_HEAD, length - USER_BLOCK):
        raise corrupt("E-05", f"A head of {head} bytes is outside the file or the limits.", head=head)
    return UserBlock(length, head, head_digest, payload, content, (major, minor))
