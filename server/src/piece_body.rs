//! Reply bodies that are serialised in pieces while the client reads them, because the source values take
//! less memory than their JSON text.

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http_body::{Frame, SizeHint};
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

/// Approximate size of one piece of a body, in bytes.
const PIECE_BYTES: usize = 32 << 10;

/// Serialises a reply body in pieces.
pub(crate) trait IncrementalBodyWriter: Send + Unpin + 'static {
    /// Appends about `bytes` bytes of the body to `out`; returns false once the body is complete.
    fn write(&mut self, bytes: usize, out: &mut BytesMut) -> bool;
}

/// Reply body that is serialised in pieces. It holds the request's memory reservation until it is dropped.
struct IncrementalBody<W, R> {
    writer: W,
    has_more: bool,
    ready: Bytes,
    _memory_reservation: R,
}

/// Creates the body, which holds the request's `memory_reservation`. A body that fits in one piece has a
/// known length.
pub(crate) fn body_of(
    mut writer: impl IncrementalBodyWriter,
    memory_reservation: impl Send + Unpin + 'static,
) -> Body {
    let mut out = BytesMut::new();
    let has_more = writer.write(PIECE_BYTES, &mut out);
    Body::new(IncrementalBody {
        writer,
        has_more,
        ready: out.freeze(),
        _memory_reservation: memory_reservation,
    })
}

impl<W: IncrementalBodyWriter, R: Unpin> http_body::Body for IncrementalBody<W, R> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = self.get_mut();
        if this.ready.is_empty() && this.has_more {
            let mut out = BytesMut::with_capacity(PIECE_BYTES);
            this.has_more = this.writer.write(PIECE_BYTES, &mut out);
            this.ready = out.freeze();
        }
        let piece = std::mem::take(&mut this.ready);
        Poll::Ready((!piece.is_empty()).then(|| Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.ready.is_empty() && !self.has_more
    }

    fn size_hint(&self) -> SizeHint {
        let mut hint = SizeHint::new();
        if !self.has_more {
            hint.set_exact(self.ready.len() as u64);
        }
        hint
    }
}
