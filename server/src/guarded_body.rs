//! Reply body with a guard that is dropped after the body, whether or not the body was sent completely.

use axum::body::Body;
use axum::http::Response;
use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};
use std::pin::Pin;
use std::task::{Context, Poll};

/// Reply body with a guard that is dropped after it.
struct GuardedBody<G> {
    // Fields are dropped in this order.
    body: Body,
    _guard: G,
}

/// Attaches `guard` to a reply body. Dropping the body ends the generation; the guard is dropped after that.
pub(crate) fn guarded<G: Unpin + Send + 'static>(
    response: Response<Body>,
    guard: G,
) -> Response<Body> {
    response.map(|body| Body::new(GuardedBody { body, _guard: guard }))
}

impl<G: Unpin> HttpBody for GuardedBody<G> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn guard_is_dropped_with_the_body() {
        let guard = Arc::new(());
        let response = guarded(Response::new(Body::from("ab")), Arc::clone(&guard));
        assert_eq!(response.body().size_hint().exact(), Some(2));
        assert_eq!(Arc::strong_count(&guard), 2);
        drop(response);
        assert_eq!(Arc::strong_count(&guard), 1);
    }
}
