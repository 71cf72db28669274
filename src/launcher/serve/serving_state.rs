//! Builds the state that the HTTP server needs to serve a started model.

use super::super::model_files::{ModelFiles, TokenizerAndTemplate};
use super::super::{engine_start, grammar_worker, parser_selection, settings, template_worker};
use crate::config::ServeArgs;
use anyhow::{Context, Result};
use engine::{RunningEngine, StartupReport};
use grammar::GrammarCompilePool;
use metrics::ServerMetrics;
use server::openai::{FieldBounds, unix_time};
use server::{ModelCard, ServingContext};
use std::sync::Arc;
use text::RequestTemplateRenderer;

/// Creates the context that request handlers need to serve the model.
pub(super) fn serving_context(
    args: &ServeArgs,
    files: &ModelFiles,
    startup: &StartupReport,
    text: TokenizerAndTemplate,
    bounds: FieldBounds,
    host: &RunningEngine,
    metrics: Arc<ServerMetrics>,
) -> Result<ServingContext> {
    let block_tokens = startup.memory.kv_spec.block_tokens;
    let architecture = files.config.architecture;
    let parsers = parser_selection::select_parsers(
        &args.reply,
        architecture,
        text.template.as_ref(),
        &text.tokenizer,
    )?;
    let tokenizer = Arc::new(text.tokenizer);
    let vocabulary_tokenizer = Arc::clone(&tokenizer);
    let timings = Arc::clone(&host.grammar_timings);
    let grammar_program = grammar_worker::program(args.log.log_format);
    let grammars = GrammarCompilePool::start(
        move || vocabulary_tokenizer.grammar_vocabulary(),
        &grammar_program,
        timings,
    )
    .context("cannot start the grammar compile threads")?;
    let prompt_bytes_max = settings::prompt_bytes_max(bounds.max_model_len);
    let trusts_templates = args.reply.trust_request_chat_template;
    let program = trusts_templates.then(template_worker::program);
    let request_templates = program
        .map(|program| RequestTemplateRenderer::new(program, &tokenizer, prompt_bytes_max))
        .transpose()?;
    Ok(ServingContext {
        client: host.client.clone(),
        grammars,
        parsers,
        tokenizer,
        template: text.template,
        pooler: text.pooler,
        card: ModelCard {
            names: files.served_names(args),
            root: files.name.clone(),
            created: unix_time(),
            fingerprint: files.fingerprint(&args.model, &startup.weights)?,
        },
        sampling_defaults: settings::sampling_defaults(&args.reply, &files.config.generation),
        template_defaults: args.reply.default_chat_template_kwargs.clone().unwrap_or_default(),
        request_templates,
        body_bytes_max: settings::body_bytes_max(bounds.max_model_len),
        pool_tokens: engine_start::pool_tokens(startup, bounds.max_model_len),
        field_bounds: bounds,
        block_tokens: if args.engine.enable_prefix_caching { block_tokens } else { 0 },
        metrics,
        kv_event_sources: Vec::new(),
        devices: startup.devices.clone(),
        info: serde_json::Value::Null,
    })
}
