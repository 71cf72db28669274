//! Submits requests whose grammar is compiled first.

use super::super::params::CompletionParams;
use crate::app::ServingContext;
use engine::{AdmissionPermit, RequestEventStream};
use grammar::{DecodingGuide, GrammarError, OutputConstraint, ThinkingBudget};
use scheduler::{RejectReason, RequestSubmission};
use std::sync::Arc;
use tracing::Span;

/// Submits requests that start once their grammar is compiled; a grammar error rejects the requests.
pub(super) fn submit_constrained(
    serving: &ServingContext,
    params: &CompletionParams,
    constraint: Arc<OutputConstraint>,
    budget: Option<ThinkingBudget>,
    submissions: Vec<RequestSubmission>,
    permit: AdmissionPermit,
) -> RequestEventStream {
    let name = params.request_id.as_deref().unwrap_or_default();
    let (stream, deferred) = serving.client.submit_deferred(submissions, params.n, name, permit);
    let (param, ignores_end) = (constraint.param.clone(), params.ignore_eos);
    let span = Span::current();
    serving.grammars.compile(constraint, move |compiled| match compiled {
        Ok(compiled) => {
            deferred.release(&DecodingGuide {
                grammar: Some(compiled.session_seed(ignores_end)),
                budget,
            });
        }
        Err(error) => {
            span.in_scope(|| log_grammar_error(&error, &param));
            deferred.reject(&rejection_of(&error, param));
        }
    });
    stream
}

/// Logs why the grammar in field `param` was not compiled.
fn log_grammar_error(error: &GrammarError, param: &str) {
    if let GrammarError::Failed { detail } = error {
        // This error is a bug in llguidance, so its message is only logged.
        tracing::warn!(param, detail, "the grammar compiler failed");
    } else {
        tracing::debug!(param, %error, "the grammar was rejected");
    }
}

/// Converts a grammar error to an engine rejection.
fn rejection_of(error: &GrammarError, param: String) -> RejectReason {
    let message = error.to_string();
    match error {
        GrammarError::WorkerUnavailable { .. } => RejectReason::TemporarilyUnavailable { message },
        GrammarError::QueueFull { .. }
        | GrammarError::Starved { .. }
        | GrammarError::QueueTimeout { .. } => RejectReason::Overloaded { message },
        GrammarError::InvalidSpaces(_) => {
            let object = param.rsplit_once('.').map_or("", |(object, _)| object);
            RejectReason::InvalidParameter {
                param: format!("{object}.whitespace_pattern"),
                message,
            }
        }
        _ => RejectReason::InvalidParameter { param, message },
    }
}
