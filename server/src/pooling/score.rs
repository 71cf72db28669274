//! POST `/score`: scores text pairs.

use super::NoStreamWriter;
use super::pair_scores::{
    PairScorer, PairScoringParams, ScoredPairs, SubmittedPairs, submit_pairs,
};
use super::text_pairs::TextPairs;
use crate::api_error::ApiError;
use crate::openai::endpoint::{
    EndpointRequest, InferenceEndpoint, ReplyMetadata, SubmittedRequest, ignored_fields,
};
use crate::openai::generation::RequestGeneration;
use axum::body::Body;
use bytes::{BufMut, BytesMut};
use std::io::Write as _;

/// Formats the reply to a score request; contains all values that the reply needs in addition to the pooled
/// vectors.
pub(super) struct ScoreReplyFormatter {
    head: ReplyMetadata,
    scorer: PairScorer,
}

impl InferenceEndpoint for ScoreReplyFormatter {
    type StreamWriter = NoStreamWriter;

    fn prepare(request: EndpointRequest<'_>) -> Result<SubmittedRequest<Self>, ApiError> {
        let EndpointRequest { app, serving, mut fields, headers, permit } = request;
        let mut request = PairScoringParams::take(&mut fields, &serving.field_bounds)?;
        let pairs = TextPairs::take(&mut fields)?;
        let ignored = ignored_fields(app, &fields)?;
        let model = serving.check_model(request.params.model.as_deref())?;
        let SubmittedPairs { generation, scorer, request_id } =
            submit_pairs(app, serving, &pairs, &mut request, headers, permit)?;
        let head = ReplyMetadata::new("score", &request_id, model, serving);
        let reply = Self { head, scorer };
        Ok(SubmittedRequest { generation, reply, stream: false, request_id, ignored })
    }

    fn stream_writer(self) -> NoStreamWriter {
        unreachable!("pooling replies are not streamed")
    }

    async fn collect(self, generation: RequestGeneration) -> Result<Body, ApiError> {
        let ScoredPairs { scores, generation } = self.scorer.collect(generation).await?;
        let mut out = BytesMut::new();
        self.head.open("list", &mut out);
        out.put_slice(b",\"data\":[");
        for (index, score) in scores.iter().enumerate() {
            let separator = if index > 0 { "," } else { "" };
            // Writing to memory cannot fail, so the result is ignored.
            let _ = write!(
                (&mut out).writer(),
                "{separator}{{\"index\":{index},\"object\":\"score\",\"score\":{score:?}}}"
            );
        }
        out.put_slice(b"],\"usage\":");
        generation.usage().write(&mut out);
        out.put_u8(b'}');
        Ok(Body::from(out.freeze()))
    }
}
