//! Frames: a header of 24 bytes, then a body. All numbers are little-endian.
//!
//! | offset | field | |
//! |--:|---|---|
//! | 0 | magic | `HDRN` |
//! | 4 | version u16 | `PROTOCOL_VERSION` |
//! | 6 | kind u16 | names the type of the body |
//! | 8 | epoch u64 | generation of the executor group |
//! | 16 | length u32 | bytes of the body |
//! | 20 | CRC-32C u32 | over the first 20 bytes and the body |

use crate::codec::{CodecError, WireMessage};
use crate::{Epoch, PROTOCOL_VERSION};

/// Bytes of a header.
pub const HEADER_BYTES: usize = 24;
/// Longest body. Bounds what a broken peer can make the other end hold; the longest true message is a
/// step's log-probabilities over the whole vocabulary.
pub const BODY_BYTES_MAX: usize = 1 << 30;

const MAGIC: [u8; 4] = *b"HDRN";
/// Bytes of the header that the checksum covers.
const CHECKSUMMED_BYTES: usize = 20;

/// What is wrong with bytes that should be a frame. The stream has no next frame after one of these.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The bytes are no frame at all.
    #[error("not a frame: it begins with {0:02x?}")]
    Magic([u8; 4]),
    /// The peer is another build.
    #[error("the peer speaks protocol {theirs}, this process {ours}")]
    Version {
        /// Of the peer.
        theirs: u16,
        /// Of this process.
        ours: u16,
    },
    /// The body is longer than any body may be.
    #[error("a body of {bytes} bytes, at most {limit}")]
    TooLong {
        /// Length named by the header, or length of what should be sent.
        bytes: usize,
        /// Largest length.
        limit: usize,
    },
    /// The bytes changed on their way.
    #[error("checksum {computed:08x}, the frame says {stored:08x}")]
    Checksum {
        /// In the header.
        stored: u32,
        /// Of what arrived.
        computed: u32,
    },
    /// A frame of a generation that this end has not heard of.
    #[error("a frame of group epoch {}, this end is of {}", theirs.0, ours.0)]
    Epoch {
        /// In the header.
        theirs: Epoch,
        /// Of this end.
        ours: Epoch,
    },
    /// The body is not what its kind says.
    #[error(transparent)]
    Body(#[from] CodecError),
}

/// A header whose magic, version and length are right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    /// Names the type of the body.
    pub kind: u16,
    /// Generation of the executor group.
    pub epoch: Epoch,
    /// Bytes of the body.
    pub body_bytes: usize,
    checksum: u32,
}

impl FrameHeader {
    /// Reads a header of a peer whose bodies have `limit` bytes at most.
    ///
    /// Errors: other magic, other version, a longer body.
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
/// Errors: the body cannot be encoded or is too long; `out` is then as it was.
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

/// The message at the beginning of `bytes`, with its epoch and the length of its frame; `None` if the
/// frame is not complete yet.
///
/// Errors: the bytes are no frame, a broken one, or one of a message that is not an `M`.
pub fn decode<M: WireMessage>(bytes: &[u8]) -> Result<Option<(M, Epoch, usize)>, FrameError> {
    decode_with_limit(bytes, BODY_BYTES_MAX)
}

/// The same of a peer whose bodies have `limit` bytes at most: longer ones are refused, also if they are there.
///
/// Errors: as `decode`.
pub fn decode_with_limit<M: WireMessage>(
    bytes: &[u8],
    limit: usize,
) -> Result<Option<(M, Epoch, usize)>, FrameError> {
    let Some(header) = bytes.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
    let header = FrameHeader::parse(header, limit)?;
    let frame_bytes = HEADER_BYTES + header.body_bytes;
    let Some(frame) = bytes.get(..frame_bytes) else { return Ok(None) };
    let computed = checksum(frame);
    if computed != header.checksum {
        return Err(FrameError::Checksum { stored: header.checksum, computed });
    }
    let message = M::decode(header.kind, &frame[HEADER_BYTES..])?;
    Ok(Some((message, header.epoch, frame_bytes)))
}

fn checksum(frame: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&frame[..CHECKSUMMED_BYTES]), &frame[HEADER_BYTES..])
}

/// `N` bytes of the header, from `at` on.
fn header_field<const N: usize>(header: &[u8; HEADER_BYTES], at: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&header[at..at + N]);
    bytes
}
