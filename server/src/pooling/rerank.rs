//! POST `/rerank`: orders documents by their relevance to a query, in the format of Jina's and Cohere's APIs.

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
use serde_json::{Value, json};

/// Formats the reply to a rerank request; contains all values that the reply needs in addition to the
/// pooled vectors.
pub(super) struct RerankReplyFormatter {
    head: ReplyMetadata,
    scorer: PairScorer,
    /// Maximum number of results.
    top_n: usize,
    /// Texts of the documents if the reply repeats them, else `None`.
    documents: Option<Vec<String>>,
}

impl InferenceEndpoint for RerankReplyFormatter {
    type StreamWriter = NoStreamWriter;

    fn prepare(request: EndpointRequest<'_>) -> Result<SubmittedRequest<Self>, ApiError> {
        let EndpointRequest { app, serving, mut fields, headers, permit } = request;
        let mut request = PairScoringParams::take(&mut fields, &serving.field_bounds)?;
        let pairs = TextPairs::take_query(&mut fields)?;
        // As in vLLM, `top_n` = 0 returns all documents.
        let top_n = fields.int("top_n", 0..=i64::MAX)?.filter(|&n| n > 0);
        let returns_documents = fields.bool("return_documents")?.unwrap_or(true);
        let ignored = ignored_fields(app, &fields)?;
        let model = serving.check_model(request.params.model.as_deref())?;
        let SubmittedPairs { generation, scorer, request_id } =
            submit_pairs(app, serving, &pairs, &mut request, headers, permit)?;
        let reply = Self {
            head: ReplyMetadata::new("rerank", &request_id, model, serving),
            scorer,
            top_n: top_n.map_or(usize::MAX, |n| usize::try_from(n).unwrap_or(usize::MAX)),
            documents: returns_documents.then_some(pairs.documents),
        };
        Ok(SubmittedRequest { generation, reply, stream: false, request_id, ignored })
    }

    fn stream_writer(self) -> NoStreamWriter {
        unreachable!("pooling replies are not streamed")
    }

    async fn collect(self, generation: RequestGeneration) -> Result<Body, ApiError> {
        let ScoredPairs { scores, generation } = self.scorer.collect(generation).await?;
        let results: Vec<Value> = ranking(&scores)
            .into_iter()
            .take(self.top_n)
            .map(|index| result(index, scores[index], self.documents.as_deref()))
            .collect();
        let tokens = generation.usage().prompt_tokens;
        let reply = json!({
            "id": self.head.id,
            "model": self.head.model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "results": results,
        });
        Ok(Body::from(reply.to_string()))
    }
}

/// Returns the document indices in descending order of score; documents with equal scores keep their request
/// order.
fn ranking(scores: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    order
}

fn result(index: usize, score: f32, documents: Option<&[String]>) -> Value {
    let mut result = json!({"index": index, "relevance_score": score});
    if let Some(document) = documents.and_then(|documents| documents.get(index)) {
        result["document"] = json!({"text": document, "multi_modal": null});
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_scores_keep_their_order() {
        assert_eq!(ranking(&[0.5, 0.75, 0.5, -0.0, 0.0]), [1, 0, 2, 4, 3]);
        assert_eq!(result(1, 0.5, None), json!({"index": 1, "relevance_score": 0.5}));
    }
}
