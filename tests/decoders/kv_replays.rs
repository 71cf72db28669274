//! Fuzz target: requests for a replay of KV events, both as frames and as bytes of a connection, and the
//! payloads of KV-event batches that subscribers decode.

use metrics::kv_events::{
    ReplayRequest, ReplayRequestReader, ZmtpFrameHead, ZmtpFrameReader, decode,
};

/// Maximum size in bytes of a frame body that the frame reader stores.
const BODY_BYTES_MAX: usize = 16;

pub(crate) fn run(data: &[u8]) {
    let _ = decode(data); // Most random data cannot be decoded, so errors are ignored.
    read_frames(data);
    // The first byte of each frame is its length, limited by the remaining bytes.
    let (mut frames, mut rest) = (Vec::new(), data);
    while let Some((&length, behind)) = rest.split_first() {
        let (frame, behind) = behind.split_at(behind.len().min(usize::from(length)));
        frames.push(frame);
        rest = behind;
    }
    let mut request = ReplayRequestReader::default();
    let mut read = None;
    for (i, body) in frames.iter().enumerate() {
        assert_eq!(read, None, "a request before its last frame");
        let has_more = i + 1 < frames.len();
        read = request
            .take(ZmtpFrameHead { is_command: false, has_more, is_body_complete: true }, body);
    }
    let is_one = frames.len() == 2 && frames[0].is_empty() && frames[1].len() == 8;
    assert_eq!(matches!(read, Some(ReplayRequest::From(_))), is_one);
}

/// Checks that frames are decoded identically from the whole data and byte by byte, and that no frame body
/// exceeds `BODY_BYTES_MAX`.
fn read_frames(data: &[u8]) {
    let whole = all_frames(data, data.len().max(1));
    assert_eq!(all_frames(data, 1), whole);
}

fn all_frames(data: &[u8], chunk: usize) -> Vec<(ZmtpFrameHead, Vec<u8>)> {
    let (mut reader, mut frames) = (ZmtpFrameReader::new(BODY_BYTES_MAX), Vec::new());
    for mut part in data.chunks(chunk) {
        while !part.is_empty() {
            match reader.read(&mut part) {
                Ok(Some(head)) => {
                    assert!(reader.body().len() <= BODY_BYTES_MAX);
                    frames.push((head, reader.body().to_vec()));
                }
                Ok(None) => {}
                Err(_) => return frames,
            }
        }
    }
    frames
}
