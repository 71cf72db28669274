//! Pooling settings, which depend on the model and the command line.

use crate::api_error::ApiError;
use protocol::PoolingMethod;

/// Task of a server with `--runner pooling`: the kind of results that it computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolingTask {
    /// Embeddings, with one prompt per text.
    Embed,
    /// Scores of text pairs, with one prompt per pair (reranker, cross-encoder).
    Score,
}

/// Embedding dimensions that requests may set (Matryoshka representation learning).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MatryoshkaDimensions {
    /// The model was not trained for shorter embeddings.
    Unsupported,
    /// Any number of dimensions up to the hidden size.
    Any,
    /// Only these numbers of dimensions.
    Listed(Vec<u32>),
}

/// Settings of pooling.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolerSettings {
    /// Task of the server: embeddings or scores.
    pub task: PoolingTask,
    /// Pooling method of every request.
    pub method: PoolingMethod,
    /// Number of channels of a hidden state, which is the number of dimensions of a full embedding.
    pub hidden_size: u32,
    /// Whether embeddings are normalised and a sigmoid is applied to scores, unless a request sets
    /// `use_activation`.
    pub use_activation: bool,
    /// Default number of embedding dimensions, used unless a request sets `dimensions`; `None` = the hidden
    /// size.
    pub dimensions: Option<u32>,
    /// Numbers of embedding dimensions that requests may set.
    pub matryoshka: MatryoshkaDimensions,
    /// Whether `--chat-template` renders the prompt of a text pair; otherwise the two texts are concatenated.
    pub has_pair_template: bool,
}

impl PoolerSettings {
    /// Returns the number of dimensions of an embedding; `requested` is the field `dimensions`.
    ///
    /// Errors: HTTP status 400 if the model does not support this number of dimensions.
    pub(super) fn dimensions(&self, requested: Option<u32>) -> Result<usize, ApiError> {
        let Some(dimensions) = requested.or(self.dimensions) else {
            return Ok(self.hidden_size as usize);
        };
        match self.dimensions_error(dimensions) {
            None => Ok(dimensions as usize),
            Some(message) => Err(ApiError::invalid("dimensions", message)),
        }
    }

    /// Checks the default number of dimensions.
    ///
    /// Errors: the reason why the model does not support it.
    pub fn check(&self) -> Result<(), String> {
        self.dimensions.and_then(|dimensions| self.dimensions_error(dimensions)).map_or(Ok(()), Err)
    }

    /// Returns the reason why the model does not support this number of dimensions; `None` if it is
    /// supported.
    fn dimensions_error(&self, dimensions: u32) -> Option<String> {
        match &self.matryoshka {
            MatryoshkaDimensions::Unsupported => Some(
                "the model does not support matryoshka representation: neither config.json nor \
                 --hf-overrides sets is_matryoshka or matryoshka_dimensions"
                    .to_owned(),
            ),
            MatryoshkaDimensions::Listed(listed) if !listed.contains(&dimensions) => {
                Some(format!("must be one of {listed:?}, got {dimensions}"))
            }
            _ if dimensions > self.hidden_size => {
                Some(format!("must be at most {}, the size of an embedding", self.hidden_size))
            }
            _ => None,
        }
    }

    /// Returns the number of pooled values that the engine returns per prompt.
    pub(crate) fn values_per_prompt(&self) -> u64 {
        match &self.method {
            PoolingMethod::LastToken | PoolingMethod::Mean => self.hidden_size.into(),
            PoolingMethod::ClassLogits => 1,
            PoolingMethod::TokenLogprobs(ids) => ids.len() as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dimensions_follow_the_matryoshka_settings() {
        let settings = |matryoshka, dimensions| PoolerSettings {
            task: PoolingTask::Embed,
            method: PoolingMethod::LastToken,
            hidden_size: 64,
            use_activation: true,
            dimensions,
            matryoshka,
            has_pair_template: false,
        };
        let unsupported = settings(MatryoshkaDimensions::Unsupported, None);
        assert_eq!(unsupported.dimensions(None).ok(), Some(64));
        assert_eq!(
            unsupported.dimensions(Some(64)).unwrap_err().param.as_deref(),
            Some("dimensions")
        );
        let any = settings(MatryoshkaDimensions::Any, Some(16));
        assert_eq!((any.dimensions(None).ok(), any.dimensions(Some(1)).ok()), (Some(16), Some(1)));
        assert!(any.dimensions(Some(65)).is_err());
        let listed = settings(MatryoshkaDimensions::Listed(vec![32, 64]), None);
        assert_eq!(listed.dimensions(Some(32)).ok(), Some(32));
        assert!(listed.dimensions(Some(16)).is_err());
    }
}
