//! Scores of text pairs: submits the prompts and computes the scores from the pooled vectors.

use super::text_pairs::{PairFieldNames, TextPair, TextPairs};
use super::{PoolingTask, prompts, vectors};
use crate::api_error::ApiError;
use crate::app::{AppState, ServingContext};
use crate::openai::chat::generation_start::{render, render_text};
use crate::openai::collect::collect;
use crate::openai::endpoint::HeaderParams;
use crate::openai::generation::RequestGeneration;
use crate::openai::params::{CompletionParams, FieldBounds};
use crate::openai::pooling_params::{self, submit_pooling};
use crate::openai::submit::{check_prompt_len, reject_if_too_long, truncate};
use crate::request_fields::RequestFields;
use engine::AdmissionPermit;
use protocol::Token;
use serde_json::json;
use text::ChatInput;

/// Maximum total size of a reranker's prompts, as a multiple of the maximum request body size.
const PROMPT_BYTES_FACTOR: usize = 4;

/// Parameters shared by score and rerank requests.
pub(super) struct PairScoringParams {
    pub(super) params: CompletionParams,
    use_activation: Option<bool>,
}

impl PairScoringParams {
    /// Parses the fields shared by score and rerank requests.
    ///
    /// Errors: HTTP status 400; the error names the invalid field.
    pub(super) fn take(fields: &mut RequestFields, bounds: &FieldBounds) -> Result<Self, ApiError> {
        for name in ["max_tokens_per_query", "max_tokens_per_doc"] {
            if fields.int(name, 0..=i64::MAX)?.is_some_and(|tokens| tokens > 0) {
                let message = "is not supported; truncate_prompt_tokens limits the whole prompt";
                return Err(ApiError::unsupported(name, message));
            }
        }
        let params = pooling_params::take(fields, bounds)?;
        Ok(Self { params, use_activation: pooling_params::take_activation(fields)? })
    }
}

/// Computes scores from the pooled vectors of a request.
pub(super) struct PairScorer {
    task: PoolingTask,
    use_activation: bool,
    /// Number of embedding dimensions used for the similarity.
    dimensions: usize,
    queries: usize,
    documents: usize,
}

/// Text pairs that were submitted to the engine.
pub(super) struct SubmittedPairs {
    pub(super) generation: RequestGeneration,
    pub(super) scorer: PairScorer,
    pub(super) request_id: String,
}

/// Scores of all pairs in document order, and the generation, which contains the token counts.
pub(super) struct ScoredPairs {
    pub(super) scores: Vec<f32>,
    pub(super) generation: RequestGeneration,
}

/// Submits the prompts of text pairs: one prompt per text for an embedding model, one prompt per pair for a
/// reranker.
pub(super) fn submit_pairs(
    app: &AppState,
    serving: &ServingContext,
    pairs: &TextPairs,
    request: &mut PairScoringParams,
    headers: &HeaderParams,
    permit: AdmissionPermit,
) -> Result<SubmittedPairs, ApiError> {
    let pooler = serving.pooler()?;
    let params = &mut request.params;
    // The pooling method must be set before tokenisation, because the prompt length limit depends on it:
    // pooling needs no room for output tokens.
    params.sampling.pooling = Some(pooler.method.clone());
    let prompts = match pooler.task {
        PoolingTask::Embed => text_prompts(serving, pairs, params)?,
        PoolingTask::Score => pair_prompts(serving, pairs, params)?,
    };
    let request_id = headers.pooling_request_id(params, serving, app)?;
    let field = pairs.fields.documents;
    let generation = submit_pooling(app, serving, params, &prompts, field, permit)?;
    let scorer = PairScorer {
        task: pooler.task,
        use_activation: request.use_activation.unwrap_or(pooler.use_activation),
        dimensions: pooler.dimensions(None)?,
        queries: pairs.queries.len(),
        documents: pairs.documents.len(),
    };
    Ok(SubmittedPairs { generation, scorer, request_id })
}

/// Returns the prompts for an embedding model: first all queries, then all documents.
fn text_prompts(
    serving: &ServingContext,
    pairs: &TextPairs,
    params: &CompletionParams,
) -> Result<Vec<Vec<Token>>, ApiError> {
    let PairFieldNames { queries, documents } = pairs.fields;
    let ids = |text: &String, field| prompts::encode(serving, text, true, params, field);
    let first = pairs.queries.iter().map(|text| ids(text, queries));
    first.chain(pairs.documents.iter().map(|text| ids(text, documents))).collect()
}

/// Returns the prompts for a reranker: one per pair.
fn pair_prompts(
    serving: &ServingContext,
    pairs: &TextPairs,
    params: &CompletionParams,
) -> Result<Vec<Vec<Token>>, ApiError> {
    pairs.check_prompt_bytes(PROMPT_BYTES_FACTOR * serving.body_bytes_max)?;
    let ids = |pair| pair_prompt(serving, pair, params, pairs.fields);
    pairs.iter().map(ids).collect()
}

/// Returns the reranker prompt that contains both texts of a pair. Errors name the field of the longer text.
fn pair_prompt(
    serving: &ServingContext,
    pair: TextPair<'_>,
    params: &CompletionParams,
    fields: PairFieldNames,
) -> Result<Vec<Token>, ApiError> {
    let TextPair { query, document } = pair;
    let query_is_longer = query.len() > document.len();
    let field = if query_is_longer { fields.queries } else { fields.documents };
    if !serving.pooler()?.has_pair_template {
        return prompts::encode(serving, &format!("{query}{document}"), true, params, field);
    }
    let messages = json!([
        {"role": "query", "content": query},
        {"role": "document", "content": document},
    ]);
    let input = ChatInput { messages, ..ChatInput::default() };
    // Only for long texts can the prompt exceed the context length; shorter texts need no check before
    // tokenisation.
    if query.len() + document.len() >= serving.field_bounds.max_model_len as usize {
        let text = render_text(serving, input.clone(), field)?;
        reject_if_too_long(serving, &text, params, field)?;
    }
    let mut ids = render(serving, input, true, field)?.ids;
    truncate(&mut ids, params.truncate);
    check_prompt_len(serving, params, ids.len(), field)?;
    Ok(ids)
}

impl PairScorer {
    /// Waits for all pooled vectors and returns the score of each pair.
    ///
    /// Errors: a failure of the request, with an HTTP status.
    pub(super) async fn collect(
        self,
        generation: RequestGeneration,
    ) -> Result<ScoredPairs, ApiError> {
        let (choices, mut generation) = collect(generation).await?;
        let pooled: Vec<Vec<f32>> =
            (0..choices.len()).map(|index| generation.take_pooled(index)).collect();
        let scores = match self.task {
            PoolingTask::Embed => self.similarities(pooled),
            PoolingTask::Score => pooled.iter().map(|values| self.activated(values)).collect(),
        };
        Ok(ScoredPairs { scores, generation })
    }

    /// Returns the cosine similarity of each pair. `pooled` contains the embeddings of the queries,
    /// followed by the embeddings of the documents.
    fn similarities(&self, pooled: Vec<Vec<f32>>) -> Vec<f32> {
        let cut = |hidden| vectors::embedding(hidden, self.dimensions, false);
        let embeddings: Vec<Vec<f32>> = pooled.into_iter().map(cut).collect();
        let (queries, documents) = embeddings.split_at(self.queries);
        let pairs = queries.iter().cycle().zip(documents).take(self.documents);
        pairs.map(|(query, document)| vectors::cosine(query, document)).collect()
    }

    /// Returns a reranker's score from one logit, or from the log-probabilities of the tokens "no" and "yes":
    /// their difference equals the difference of the two logits.
    fn activated(&self, values: &[f32]) -> f32 {
        let logit = match values {
            [no, yes] => yes - no,
            values => values.first().copied().unwrap_or_default(),
        };
        if self.use_activation { vectors::sigmoid(logit) } else { logit }
    }
}
