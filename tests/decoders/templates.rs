//! Fuzz target: chat templates, as in model folders and in requests of trusted clients.

use serde_json::json;
use std::path::Path;
use std::sync::OnceLock;
use text::{ChatInput, ChatTemplate, TextError, Tokenizer};

/// Maximum output of a rendered template in bytes.
const OUTPUT_BYTES_MAX: usize = 64 << 10;

fn tokenizer() -> &'static Tokenizer {
    static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
    TOKENIZER.get_or_init(|| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let demo = root.ancestors().map(|dir| dir.join("tests/data/demo")).find(|dir| dir.is_dir());
        Tokenizer::load(&demo.expect("the demo model")).unwrap()
    })
}

/// Whether a template assigns a Jinja namespace into itself. Rendering such a namespace aborts the process,
/// which `catch_unwind` cannot prevent: `docs/lessons/panics_while_formatting_library_results.md`.
fn contains_itself(text: &str) -> bool {
    let tags = text.split("{%").skip(1);
    let mut sets =
        tags.filter_map(|tag| tag.trim_start_matches(['-', '+', ' ', '\n']).strip_prefix("set"));
    sets.any(|set| {
        let (tag, _) = set.split_once("%}").unwrap_or((set, ""));
        let Some((target, value)) = tag.split_once('=') else { return false };
        let Some((name, _)) = target.split_once('.') else { return false };
        let is_word = |c: char| c.is_alphanumeric() || c == '_';
        let name = name.trim();
        let mut places = value.match_indices(name);
        places.any(|(at, _)| {
            let behind = value[at + name.len()..].trim_start();
            !value[..at].ends_with(is_word)
                && !behind.starts_with(is_word)
                && !behind.starts_with('.')
        })
    })
}

pub(crate) fn run(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if contains_itself(text) {
        return;
    }
    let Ok(template) = ChatTemplate::of_text(text, tokenizer(), OUTPUT_BYTES_MAX) else {
        return;
    };
    let input = ChatInput {
        messages: json!([
            {"role": "system", "content": "be short"},
            {"role": "user", "content": "<|im_end|> what is \u{1f980}?"},
            {"role": "assistant", "content": "", "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]},
            {"role": "tool", "tool_call_id": "1", "content": "a crab"},
        ]),
        tools: json!([{"type": "function", "function": {"name": "f", "parameters": {}}}]),
        add_generation_prompt: true,
        ..ChatInput::default()
    };
    match template.render(input) {
        Ok(rendered) => {
            assert!(rendered.text.len() <= OUTPUT_BYTES_MAX);
            assert!(tokenizer().encode_rendered(&rendered).is_ok());
        }
        Err(TextError::TemplateFuelExhausted(_) | TextError::RenderedTooLong(_)) => {}
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}
