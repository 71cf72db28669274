//! ZMTP frames: a parser of untrusted bytes with a bounded buffer, and functions that write frames.

/// Flag MORE: another frame of the same message follows.
const MORE: u8 = 1;
/// Flag LONG: the length has 8 bytes.
const LONG: u8 = 2;
/// Flag COMMAND: the frame is a command, not part of a message.
const COMMAND: u8 = 4;
/// Maximum length of a peer's frame, in bytes; a longer frame ends the connection. The reader skips shorter
/// frames whose body exceeds `body_bytes_max`.
const FRAME_BYTES_MAX: u64 = 64 << 10;

/// Reason why bytes are rejected as a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ZmtpFrameError {
    /// Flags that ZMTP 3 reserves are set.
    #[error("a frame with the flags {0:#04x}")]
    Flags(u8),
    /// The frame is longer than `FRAME_BYTES_MAX`.
    #[error("a frame of {0} bytes, more than {FRAME_BYTES_MAX}")]
    Length(u64),
}

/// Header of a received frame; `ZmtpFrameReader::body` returns the body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZmtpFrameHead {
    /// Whether the frame is a command rather than part of a message.
    pub is_command: bool,
    /// Whether another frame of the same message follows.
    pub has_more: bool,
    /// Whether the body was kept; if not, `body` is empty.
    pub is_body_complete: bool,
}

/// Parser of ZMTP frames. It keeps one body of at most `body_bytes_max` bytes, whatever the peer sends.
#[derive(Debug)]
pub struct ZmtpFrameReader {
    body_bytes_max: usize,
    header: [u8; 9],
    header_len: usize,
    body: Vec<u8>,
    /// Number of body bytes not received yet; valid once the header is complete.
    body_bytes_missing: u64,
}

impl ZmtpFrameReader {
    /// Creates a reader that keeps bodies of up to `body_bytes_max` bytes and skips longer ones.
    pub fn new(body_bytes_max: usize) -> Self {
        Self {
            body_bytes_max,
            header: [0; 9],
            header_len: 0,
            body: Vec::new(),
            body_bytes_missing: 0,
        }
    }

    /// Consumes bytes of `input` up to the end of a frame and returns its header; `None` if `input` ends
    /// before the frame does.
    ///
    /// Errors: the frame is invalid and parsing cannot continue.
    pub fn read(&mut self, input: &mut &[u8]) -> Result<Option<ZmtpFrameHead>, ZmtpFrameError> {
        while !self.has_header() {
            let Some((&byte, rest)) = input.split_first() else { return Ok(None) };
            *input = rest;
            self.push_header_byte(byte)?;
        }
        let is_body_complete = self.length() <= self.body_bytes_max as u64;
        let taken = input.len().min(self.body_bytes_missing as usize);
        let (part, rest) = input.split_at(taken);
        if is_body_complete {
            self.body.extend_from_slice(part);
        }
        (*input, self.body_bytes_missing) = (rest, self.body_bytes_missing - taken as u64);
        if self.body_bytes_missing > 0 {
            return Ok(None);
        }
        self.header_len = 0;
        let flags = self.header[0];
        let (is_command, has_more) = (flags & COMMAND != 0, flags & MORE != 0);
        Ok(Some(ZmtpFrameHead { is_command, has_more, is_body_complete }))
    }

    /// Appends a byte to the header of the current frame. The first byte starts a new frame; the last one
    /// completes the body length.
    ///
    /// Errors: reserved flags are set, or the frame is too long.
    fn push_header_byte(&mut self, byte: u8) -> Result<(), ZmtpFrameError> {
        if self.header_len == 0 {
            if byte & !(MORE | LONG | COMMAND) != 0 {
                return Err(ZmtpFrameError::Flags(byte));
            }
            self.body.clear();
        }
        self.header[self.header_len] = byte;
        self.header_len += 1;
        if self.has_header() {
            self.body_bytes_missing = self.length();
            if self.body_bytes_missing > FRAME_BYTES_MAX {
                return Err(ZmtpFrameError::Length(self.body_bytes_missing));
            }
        }
        Ok(())
    }

    /// Returns the body of the last received frame.
    pub fn body(&self) -> &[u8] {
        &self.body
    }

    fn has_header(&self) -> bool {
        self.header_len == if self.header[0] & LONG != 0 { 9 } else { 2 } && self.header_len > 0
    }

    fn length(&self) -> u64 {
        let [_, length @ ..] = self.header;
        if self.header[0] & LONG != 0 { u64::from_be_bytes(length) } else { u64::from(length[0]) }
    }
}

/// Appends the header of a message frame with a body of `length` bytes.
pub(crate) fn frame_header(has_more: bool, length: usize, out: &mut Vec<u8>) {
    header(if has_more { MORE } else { 0 }, length, out);
}

/// Appends a frame of a message.
pub(crate) fn put_frame(has_more: bool, body: &[u8], out: &mut Vec<u8>) {
    frame_header(has_more, body.len(), out);
    out.extend_from_slice(body);
}

/// Appends a command frame.
pub(super) fn put_command(name: &[u8], data: &[u8], out: &mut Vec<u8>) {
    header(COMMAND, 1 + name.len() + data.len(), out);
    out.push(name.len() as u8);
    out.extend_from_slice(name);
    out.extend_from_slice(data);
}

fn header(flags: u8, length: usize, out: &mut Vec<u8>) {
    if let Ok(short) = u8::try_from(length) {
        out.extend_from_slice(&[flags, short]);
    } else {
        out.push(flags | LONG);
        out.extend_from_slice(&(length as u64).to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(bytes: &[u8], chunk: usize) -> Result<Vec<(ZmtpFrameHead, Vec<u8>)>, ZmtpFrameError> {
        let (mut reader, mut frames) = (ZmtpFrameReader::new(300), Vec::new());
        for mut part in bytes.chunks(chunk) {
            while !part.is_empty() {
                if let Some(head) = reader.read(&mut part)? {
                    frames.push((head, reader.body().to_vec()));
                }
            }
        }
        Ok(frames)
    }

    #[test]
    fn frames_read_alike_however_bytes_arrive() {
        let mut wire = Vec::new();
        put_frame(true, b"", &mut wire);
        put_command(b"PING", b"\0\x05abc", &mut wire);
        put_frame(false, &[7; 300], &mut wire);
        put_frame(false, &[8; 301], &mut wire);
        put_frame(false, b"end", &mut wire);
        let head = |is_command, has_more, is_body_complete| ZmtpFrameHead {
            is_command,
            has_more,
            is_body_complete,
        };
        let expected = vec![
            (head(false, true, true), Vec::new()),
            (head(true, false, true), b"\x04PING\0\x05abc".to_vec()),
            (head(false, false, true), vec![7; 300]),
            (head(false, false, false), Vec::new()),
            (head(false, false, true), b"end".to_vec()),
        ];
        for chunk in [1, 2, 3, 7, 64, wire.len()] {
            assert_eq!(all(&wire, chunk).as_ref(), Ok(&expected), "{chunk}");
        }
    }

    #[test]
    fn oversized_frames_and_unknown_flags_are_errors() {
        let mut long = vec![LONG];
        long.extend_from_slice(&(FRAME_BYTES_MAX + 1).to_be_bytes());
        assert_eq!(all(&long, 1), Err(ZmtpFrameError::Length(FRAME_BYTES_MAX + 1)));
        long[1..].fill(0xff);
        assert_eq!(all(&long, 9), Err(ZmtpFrameError::Length(u64::MAX)));
        assert_eq!(all(&[0x08, 0], 2), Err(ZmtpFrameError::Flags(8)));
    }
}
