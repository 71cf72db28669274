//! A constraint becomes a grammar that sessions can follow, or a refusal that says why not.

use super::constraint::{GrammarSpec, JsonWhitespace, OutputConstraint};
use super::error_message::client_message;
use super::limits::{
    COMPILE_TIME, COMPILED_BYTES_MAX, MASK_SLOW_IN_DRY_RUN, NESTING_MAX, SEPARATE_CHOICES_MAX,
    TEXT_BYTES_MAX, WORKER_BYTES, parser_limits,
};
use super::lock;
use super::matcher_copies::{MatcherCopies, MatcherCopy};
use super::number_keywords;
use super::schema_cost;
use super::session::{GrammarSession, SessionSeed};
use super::timings::thread_cpu_time;
use super::vocabulary::{GrammarVocabulary, TokenTrie};
use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use llguidance::toktrie::TokEnv;
use llguidance::{Matcher, ParserFactory};
use protocol::Token;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Bytes that a compiled grammar takes for each byte of its text, roughly, beside its lexer.
const BYTES_PER_TEXT_BYTE: usize = 64;
/// Texts that a new grammar is tried with, and tokens of each.
const DRY_RUN_TEXTS: u32 = 4;
const DRY_RUN_TOKENS: u32 = 12;

/// Why there is no grammar.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum GrammarError {
    /// It is too long.
    #[error("the grammar has {bytes} bytes, the limit is {TEXT_BYTES_MAX}")]
    TooLong {
        /// Bytes of its text.
        bytes: usize,
    },
    /// Its brackets are too deep.
    #[error("the grammar nests {depth} brackets, the limit is {NESTING_MAX}")]
    TooDeep {
        /// Brackets within each other.
        depth: usize,
    },
    /// It is too large once compiled.
    #[error("the compiled grammar has {bytes} bytes, the limit is {COMPILED_BYTES_MAX}")]
    TooLarge {
        /// Bytes it takes.
        bytes: usize,
    },
    /// It is wrong, or asks for what cannot be enforced.
    #[error("{0}")]
    Invalid(String),
    /// The pattern of its white space is.
    #[error("{0}")]
    InvalidSpaces(String),
    /// The compiler library failed in a way that says nothing about the grammar to a client.
    #[error("the grammar cannot be compiled")]
    Failed {
        /// The library's text, for the log only.
        detail: String,
    },
    /// It is too complex.
    #[error("the grammar took longer than {} ms to compile", COMPILE_TIME.as_millis())]
    TooSlow,
    /// Nobody knows what it takes: the machine had no processor to try it on.
    #[error(
        "in {waited_ms} ms the grammar had a processor for {processor_ms} ms: the machine has none to spare"
    )]
    Starved {
        /// How long it was waited for.
        waited_ms: u64,
        /// What it had of a processor, to ten milliseconds.
        processor_ms: u64,
    },
    /// It broke the processes that tried it, one after the other.
    #[error(
        "the process that compiled the grammar ended ({how}): it may take {} MiB",
        WORKER_BYTES >> 20
    )]
    WorkerCrashed {
        /// How it ended.
        how: String,
    },
    /// Grammars cannot be tried: the fault of no grammar.
    #[error("the process that tries grammars cannot be started")]
    WorkerUnavailable {
        /// Why, for the log only.
        cause: String,
    },
    /// Too many grammars wait.
    #[error("{waiting} grammars are waiting, the limit is {limit}")]
    QueueFull {
        /// How many.
        waiting: usize,
        /// How many may.
        limit: usize,
    },
    /// Those before it took too long.
    #[error("the grammar has waited {waited_ms} ms to be compiled, the limit is {limit_ms} ms")]
    QueueTimeout {
        /// How long it waited.
        waited_ms: u64,
        /// How long it may.
        limit_ms: u64,
    },
}

/// What compiles for one tokenizer.
pub struct GrammarCompiler {
    factory: ParserFactory,
    end_ids: Arc<[Token]>,
    matcher_copies: MatcherCopies,
}

/// A compiled grammar; clones share it.
#[derive(Clone)]
pub struct CompiledGrammar {
    /// Never advanced. Requests begin with copies that share nothing with it, so that what one of them spends is
    /// no other's.
    prototype: Arc<Mutex<Matcher>>,
    end_ids: Arc<[Token]>,
    matcher_copies: MatcherCopies,
    /// Bytes it takes, roughly.
    pub(super) bytes: usize,
    /// Whether its trial, or a request, met a mask that no step should wait for.
    pub(super) is_slow: Arc<AtomicBool>,
}

/// What the trial of a grammar has found out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DryRunReport {
    /// Most processor time of a mask.
    pub(super) slowest_mask: Duration,
}

impl GrammarCompiler {
    /// What compiles for these tokens.
    ///
    /// Errors: an explanation, if grammars cannot be followed with these tokens.
    pub fn new(vocabulary: GrammarVocabulary) -> Result<Self, String> {
        let ends: Arc<[Token]> = vocabulary.end_ids.clone().into();
        let trie = TokenTrie::new(vocabulary).ok_or("the model has no token that ends a text")?;
        let env: TokEnv = Arc::new(trie);
        let factory = ParserFactory::new_simple(&env);
        let mut factory = factory.map_err(|error| {
            tracing::error!(%error, "grammars cannot be followed");
            "grammars cannot be followed with this tokenizer"
        })?;
        factory.quiet();
        *factory.limits_mut() = parser_limits();
        Ok(Self { factory, end_ids: ends, matcher_copies: MatcherCopies::default() })
    }

    /// Bytes of the copies that sessions follow.
    #[cfg(test)]
    pub(super) fn matcher_copy_bytes(&self) -> usize {
        self.matcher_copies.bytes_in_use()
    }

    /// Compiles and follows some texts, however long it takes.
    ///
    /// Errors: it is wrong, too large, or cannot be followed within limits.
    pub fn dry_run(&self, constraint: &OutputConstraint) -> Result<DryRunReport, GrammarError> {
        let tried = catch_compiler_panic(constraint, || self.sample_masks(constraint));
        let GrammarSpec::Json { whitespace: JsonWhitespace::Pattern(regex), .. } = &constraint.spec
        else {
            return tried;
        };
        tried.map_err(|error| {
            let alone =
                OutputConstraint::new(GrammarSpec::Regex(regex.clone()), constraint.param.clone());
            match catch_compiler_panic(&alone, || self.matcher(&alone)) {
                Ok(_) => error,
                Err(failed @ GrammarError::Failed { .. }) => failed,
                Err(alone) => GrammarError::InvalidSpaces(alone.to_string()),
            }
        })
    }

    /// Compiles what has passed its trial: it takes about as long again.
    pub(super) fn compile(
        &self,
        constraint: &OutputConstraint,
        findings: DryRunReport,
    ) -> Result<CompiledGrammar, GrammarError> {
        let (matcher, bytes) = catch_compiler_panic(constraint, || self.matcher(constraint))?;
        let prototype = Arc::new(Mutex::new(matcher));
        let (ends, copies) = (Arc::clone(&self.end_ids), self.matcher_copies.clone());
        let is_slow = Arc::new(AtomicBool::new(findings.slowest_mask > MASK_SLOW_IN_DRY_RUN));
        Ok(CompiledGrammar { prototype, end_ids: ends, matcher_copies: copies, bytes, is_slow })
    }

    fn matcher(&self, constraint: &OutputConstraint) -> Result<(Matcher, usize), GrammarError> {
        let text_bytes = check(constraint)?;
        let parser = self
            .factory
            .create_parser(grammar(constraint)?)
            .map_err(|error| client_message(&error))?;
        let bytes = parser.parser.lexer_stats().num_bytes + BYTES_PER_TEXT_BYTE * text_bytes;
        if bytes > COMPILED_BYTES_MAX {
            return Err(GrammarError::TooLarge { bytes });
        }
        Ok((Matcher::new(Ok(parser)), bytes))
    }

    fn sample_masks(&self, constraint: &OutputConstraint) -> Result<DryRunReport, GrammarError> {
        let (matcher, _) = self.matcher(constraint)?;
        let mut slowest_mask = Duration::ZERO;
        for walk in 0..DRY_RUN_TEXTS {
            let session =
                GrammarSession::new(matcher.deep_clone(), Arc::clone(&self.end_ids), false);
            slowest_mask = slowest_mask
                .max(follow_random_text(session, walk).map_err(|error| client_message(&error))?);
        }
        Ok(DryRunReport { slowest_mask })
    }
}

/// Runs the compiler, whose panics refuse the grammar.
fn catch_compiler_panic<T>(
    constraint: &OutputConstraint,
    work: impl FnOnce() -> Result<T, GrammarError>,
) -> Result<T, GrammarError> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        tracing::error!(param = constraint.param, "the grammar compiler panicked");
        let said = panic.downcast_ref::<String>().map(String::as_str);
        let said = said.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or_default();
        Err(GrammarError::Failed { detail: format!("the compiler panicked: {said}") })
    })
}

/// Follows some text for a few tokens. Fails where a step costs more than it may: most grammars that do so
/// anywhere do so soon, and are then refused instead of failing in the middle of an output. Returns the processor
/// time of the slowest mask.
fn follow_random_text(mut session: GrammarSession, walk: u32) -> anyhow::Result<Duration> {
    let mut slowest = Duration::ZERO;
    for step in 0..DRY_RUN_TOKENS {
        let since = thread_cpu_time();
        let mask = session.try_mask()?; // A grammar without any text is found out by the first one.
        slowest = slowest.max(thread_cpu_time().saturating_sub(since));
        if session.is_finished() {
            break;
        }
        let pick = (walk * DRY_RUN_TOKENS + step).wrapping_mul(0x9e37_79b9) >> 8;
        let Some(token) = session.pick(&mask, pick) else { break };
        session.advance(&[token]);
    }
    Ok(slowest)
}

impl CompiledGrammar {
    /// What the choices of one request begin with. With `ignores_end` a token that ends the text is allowed only
    /// where nothing else is.
    pub fn session_seed(&self, ignores_end: bool) -> SessionSeed {
        SessionSeed::new(self.clone(), ignores_end)
    }

    /// A copy for one request.
    pub(super) fn matcher_copy(&self) -> MatcherCopy {
        self.matcher_copies.copy_of(&lock(&self.prototype), self.bytes)
    }

    /// Ids that end a text.
    pub(super) fn end_ids(&self) -> &Arc<[Token]> {
        &self.end_ids
    }
}

impl std::fmt::Debug for CompiledGrammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compiled").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

/// Bytes of the constraint's text, which is neither too long nor too deep, nor known to take for ever.
pub(super) fn check(constraint: &OutputConstraint) -> Result<usize, GrammarError> {
    match &constraint.spec {
        GrammarSpec::Json { schema, whitespace: spaces } => {
            let of_spaces = match spaces {
                JsonWhitespace::Pattern(regex) => check_bounds(regex.len(), nesting(regex)),
                JsonWhitespace::Any | JsonWhitespace::None => Ok(0),
            };
            let of_spaces = of_spaces.map_err(|e| GrammarError::InvalidSpaces(e.to_string()))?;
            schema_cost::check(schema)?;
            number_keywords::prepare(&mut schema.clone())?;
            check_bounds(schema.to_string().len() + of_spaces, depth_of(schema))
        }
        GrammarSpec::Regex(text) => check_bounds(text.len(), nesting(text)),
        GrammarSpec::Lark(text) => {
            schema_cost::check_lark(text)?;
            check_bounds(text.len(), nesting(text))
        }
        GrammarSpec::Choice(texts) => check_bounds(texts.iter().map(String::len).sum(), 0),
    }
}

fn check_bounds(bytes: usize, depth: usize) -> Result<usize, GrammarError> {
    match (bytes, depth) {
        (bytes, _) if bytes > TEXT_BYTES_MAX => Err(GrammarError::TooLong { bytes }),
        (_, depth) if depth > NESTING_MAX => Err(GrammarError::TooDeep { depth }),
        _ => Ok(bytes),
    }
}

/// Most brackets open at a time. Those in strings count too: nobody needs so many of them.
fn nesting(text: &str) -> usize {
    let (mut depth, mut deepest) = (0_usize, 0);
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(depth);
    }
    deepest
}

/// Levels of a JSON value, with the brackets of the deepest string in it.
fn depth_of(value: &Value) -> usize {
    match value {
        Value::Array(list) => 1 + list.iter().map(depth_of).max().unwrap_or(0),
        Value::Object(map) => 1 + map.values().map(depth_of).max().unwrap_or(0),
        Value::String(text) => nesting(text),
        _ => 0,
    }
}

fn grammar(constraint: &OutputConstraint) -> Result<TopLevelGrammar, GrammarError> {
    let mut whole = match &constraint.spec {
        GrammarSpec::Json { schema, whitespace: spaces } => {
            GrammarWithLexer::from_json_schema(with_whitespace(schema, spaces)?)
        }
        GrammarSpec::Regex(regex) => GrammarWithLexer::from_regex(regex),
        GrammarSpec::Choice(texts) => GrammarWithLexer::from_lark(choice_grammar(texts)),
        GrammarSpec::Lark(text) => GrammarWithLexer::from_lark(text.clone()),
    };
    let Some(marker) = &constraint.start_after else {
        return Ok(TopLevelGrammar::from_grammar(whole));
    };
    whole.name = Some("rest".to_owned());
    let marker = Value::from(marker.as_str());
    let head = format!("start: head @rest\nhead[suffix={marker}]: /(?s:.*)/\n");
    let grammars = vec![GrammarWithLexer::from_lark(head), whole];
    Ok(TopLevelGrammar { grammars, max_tokens: None })
}

/// One of several texts, as a grammar. Each of a few is a word of its own, so that a long one is spelled without a look at
/// the others; many are one word, since a parser follows only so many at a time.
fn choice_grammar(texts: &[String]) -> String {
    let quoted = texts.iter().map(|text| Value::from(text.as_str()).to_string());
    let listed = quoted.collect::<Vec<_>>().join(" | ");
    if texts.len() <= SEPARATE_CHOICES_MAX {
        format!("start: {listed}\n")
    } else {
        format!("start: CHOICE\nCHOICE: {listed}\n")
    }
}

/// The schema with the compiler's options. A request cannot bring options of its own: one of them widens
/// the grammar where a keyword is unknown.
fn with_whitespace(schema: &Value, spaces: &JsonWhitespace) -> Result<Value, GrammarError> {
    const OPTIONS: &str = "x-guidance";
    let schema = match schema {
        Value::Object(map) => map.clone(),
        Value::Bool(true) => serde_json::Map::new(),
        _ => return Err(GrammarError::Invalid("a schema is an object".to_owned())),
    };
    if schema.contains_key(OPTIONS) {
        return Err(GrammarError::Invalid(format!("Unimplemented keys: [\"{OPTIONS}\"]")));
    }
    let mut schema = Value::Object(schema);
    number_keywords::prepare(&mut schema)?;
    let options = match spaces {
        JsonWhitespace::Any => None,
        JsonWhitespace::None => Some(json!({"whitespace_flexible": false})),
        JsonWhitespace::Pattern(regex) => Some(json!({"whitespace_pattern": regex})),
    };
    if let Some(options) = options {
        schema[OPTIONS] = options;
    }
    Ok(schema)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depth_is_that_of_brackets() {
        assert_eq!(nesting("(a[b]{2})(c)"), 2);
        assert_eq!(depth_of(&json!({"a": [{"pattern": "((x))"}]})), 5);
    }
}
