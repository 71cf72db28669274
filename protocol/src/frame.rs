//! Frames: a header of 24 bytes, then a body. All numbers are little-endian.
//!
//! | offset | field | |
//! |--:|---|---|
//! | 0 | magic | `HDRN` |
//! | 4 | version u16 | `PROTOCOL_VERSION` |
//! | 6 | kind u16 | type of the body |
//! | 8 | epoch u64 | epoch of the executor group |
//! | 16 | length u32 | bytes of the body |
//! | 20 | CRC-32C u32 | over the first 20 bytes and the body |

use crate::codec::{CodecError, WireMessage};
use crate::{Epoch, PROTOCOL_VERSION};

/// Length of a frame header in bytes.
pub const HEADER_BYTES: usize = 24;
/// Maximum length of a body in bytes. It bounds the memory that a faulty peer can make this process allocate;
/// the longest valid message has a step's logprobs over the whole vocabulary.
pub const BODY_BYTES_MAX: usize = 1 << 30;

const MAGIC: [u8; 4] = *b"HDRN";
/// Number of header bytes that the checksum covers.
const CHECKSUMMED_BYTES: usize = 20;

/// Error of encoding or decoding a frame. After a decoding error, the stream cannot be resynchronised.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The bytes do not start with the magic number.
    #[error("not a frame: magic number {0:02x?}")]
    Magic([u8; 4]),
    /// The peer has a different protocol version.
    #[error("the peer has protocol version {theirs}, this process has {ours}")]
    Version {
        /// Version of the peer.
        theirs: u16,
        /// Version of this process.
        ours: u16,
    },
    /// The body is longer than the limit.
    #[error("a body of {bytes} bytes exceeds the limit of {limit}")]
    TooLong {
        /// Length in the header, or length of the message to be sent, in bytes.
        bytes: usize,
        /// Maximum length in bytes.
        limit: usize,
    },
    /// The checksum does not match: the bytes were corrupted.
    #[error("checksum mismatch: computed {computed:08x}, header {stored:08x}")]
    Checksum {
        /// Checksum in the header.
        stored: u32,
        /// Checksum of the received bytes.
        computed: u32,
    },
    /// The frame has a newer epoch than this end of the link.
    #[error("the frame has epoch {}, this end has epoch {}", theirs.0, ours.0)]
    Epoch {
        /// Epoch in the header.
        theirs: Epoch,
        /// Epoch of this end of the link.
        ours: Epoch,
    },
    /// The body does not have the type of its kind.
    #[error(transparent)]
    Body(#[from] CodecError),
}

/// A frame header with valid magic, version and length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    /// Message kind.
    pub kind: u16,
    /// Epoch of the executor group: a number that increases when the executors are restarted.
    pub epoch: Epoch,
    /// Length of the body in bytes.
    pub body_bytes: usize,
    checksum: u32,
}

impl FrameHeader {
    /// Parses a header; bodies may have at most `limit` bytes.
    ///
    /// Errors: wrong magic, wrong version, or a body longer than `limit`.
    pub fn parse(bytes: &[u8; HEADER_BYTES], limit: usize) -> Result<Self, FrameError> {
        let magic = header_field(bytes, 0);
        if magic != MAGIC {
            return Err(FrameError::Magic(magic));
        }
        let theirs = u16::from_le_bytes(header_field(bytes, 4));
        if theirs != PROTOCOL_VERSION {
            return Err(FrameError::Version { theirs, ours: PROTOCOL_VERSION });
        }
        let body_bytes = u32::from_le_bytes(header_field(bytes, 16)) as usize;
        if body_bytes > limit {
            return Err(FrameError::TooLong { bytes: body_bytes, limit });
        }
        let kind = u16::from_le_bytes(header_field(bytes, 6));
        let epoch = Epoch(u64::from_le_bytes(header_field(bytes, 8)));
        let checksum = u32::from_le_bytes(header_field(bytes, CHECKSUMMED_BYTES));
        Ok(Self { kind, epoch, body_bytes, checksum })
    }
}

/// Appends a message as a frame to `out`.
///
/// Errors: the body cannot be encoded or is too long; `out` is then unchanged.
pub fn encode<M: WireMessage>(
    message: &M,
    epoch: Epoch,
    out: &mut Vec<u8>,
) -> Result<(), FrameError> {
    let start = out.len();
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&PROTOCOL_VERSION.to_le_bytes());
    out.extend_from_slice(&message.kind().to_le_bytes());
    out.extend_from_slice(&epoch.0.to_le_bytes());
    out.extend_from_slice(&[0; HEADER_BYTES - 16]);
    let body = start + HEADER_BYTES;
    if let Err(error) = message.encode(out) {
        out.truncate(start);
        return Err(error.into());
    }
    let bytes = out.len() - body;
    if bytes > BODY_BYTES_MAX {
        out.truncate(start);
        return Err(FrameError::TooLong { bytes, limit: BODY_BYTES_MAX });
    }
    out[start + 16..start + CHECKSUMMED_BYTES].copy_from_slice(&(bytes as u32).to_le_bytes());
    let crc = checksum(&out[start..]);
    out[start + CHECKSUMMED_BYTES..body].copy_from_slice(&crc.to_le_bytes());
    Ok(())
}

/// A decoded frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DecodedFrame<M> {
    /// Message of the body.
    pub message: M,
    /// Epoch of the executor group: a number that increases when the executors are restarted.
    pub epoch: Epoch,
    /// Length of the frame in bytes, header and body.
    pub frame_bytes: usize,
}

/// Decodes the frame at the start of `bytes`; `None` if it is incomplete.
///
/// Errors: the bytes are not a frame, the frame is corrupt, or the message is not an `M`.
pub fn decode<M: WireMessage>(bytes: &[u8]) -> Result<Option<DecodedFrame<M>>, FrameError> {
    decode_with_limit(bytes, BODY_BYTES_MAX)
}

/// Decodes a frame as `decode` does; bodies longer than `limit` bytes are rejected.
///
/// Errors: the errors of `decode`, and a body longer than `limit`.
pub fn decode_with_limit<M: WireMessage>(
    bytes: &[u8],
    limit: usize,
) -> Result<Option<DecodedFrame<M>>, FrameError> {
    let Some(header) = bytes.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
    let header = FrameHeader::parse(header, limit)?;
    let frame_bytes = HEADER_BYTES + header.body_bytes;
    let Some(frame) = bytes.get(..frame_bytes) else { return Ok(None) };
    let computed = checksum(frame);
    if computed != header.checksum {
        return Err(FrameError::Checksum { stored: header.checksum, computed });
    }
    let message = M::decode(header.kind, &frame[HEADER_BYTES..])?;
    Ok(Some(DecodedFrame { message, epoch: header.epoch, frame_bytes }))
}

fn checksum(frame: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&frame[..CHECKSUMMED_BYTES]), &frame[HEADER_BYTES..])
}

/// Returns `N` bytes of the header from offset `at`.
fn header_field<const N: usize>(header: &[u8; HEADER_BYTES], at: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&header[at..at + N]);
    bytes
}
