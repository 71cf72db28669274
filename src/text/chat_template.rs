//! The chat template of a model folder: messages to the prompt's text.
//!
//! Compiled once at start. Rendering follows `apply_chat_template` of transformers 5 (Jinja2 with
//! trimmed and left-stripped blocks, `tojson` as Python writes JSON, `raise_exception`,
//! `strftime_now`, loop controls, `{% generation %}` ignored) and is bounded in instructions and
//! in output. Templates of requests are served where the operator trusts clients.

use std::fmt::Write as _;
use std::io;
use std::path::Path;
use std::time::SystemTime;

use minijinja::value::{Kwargs, Value as Jinja, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State};
use serde_json::{Map, Value};

use super::contained::contained;
use super::error::{LoadError, TextError};
use super::guard::{Guard, unmark, unused_characters};
use super::json_python::tojson;
use super::strftime::strftime;
use super::tokenizer::{Tokenizer, read, read_json};

/// Instructions one rendering may take.
const FUEL: u64 = 500_000;

/// It panics where some templates reverse an empty text, and where it shows some errors (minijinja 2.24); such a template
/// fails like any other.
const ENGINE: &str = "template engine";

/// Characters of a template's own refusal that a client gets to see: it may repeat what the client sent.
const RAISED_CHARS: usize = 1_000;

/// Template files beyond this are refused.
pub const TEMPLATE_BYTES_MAX: usize = 1 << 20;

/// What a template reads. All strings in it but the template count as the user's.
#[derive(Debug, Clone, Default)]
pub struct ChatInput {
    /// A template of the request's own.
    pub template: Option<String>,
    /// The messages, an array of objects as in the request.
    pub messages: Value,
    /// Tool definitions, or null.
    pub tools: Value,
    /// Documents, or null.
    pub documents: Value,
    /// End with the opening of an assistant turn.
    pub add_generation_prompt: bool,
    /// Leave the last message open, to be continued.
    pub continue_final_message: bool,
    /// `chat_template_kwargs`, after the server's defaults.
    pub kwargs: Map<String, Value>,
}

/// A prompt's text, with the places where the user typed (part of) a special token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    /// The text.
    pub text: String,
    /// Ascending byte positions that no special token may cover.
    pub(super) marks: Vec<usize>,
}

/// The compiled templates of one model.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    guard: Guard,
    special: Vec<(String, String)>,
    output_bytes_max: usize,
}

impl ChatTemplate {
    /// Compiles the template of `dir`, or `chosen` (`--chat-template`: a file, or the template
    /// itself). `Ok(None)` if the model has none: chat requests are then refused.
    ///
    /// Looked for in `chat_template.jinja`, `chat_template.json` and `tokenizer_config.json`, in
    /// that order; a list of named templates is understood. Rendering stops at
    /// `output_bytes_max` bytes.
    pub fn load(
        dir: &Path,
        chosen: Option<&str>,
        tokenizer: &Tokenizer,
        output_bytes_max: usize,
    ) -> Result<Option<Self>, LoadError> {
        let sources = match chosen {
            Some(chosen) => vec![Source::chosen(chosen)?],
            None => Source::of_model(dir)?,
        };
        if sources.is_empty() {
            return Ok(None);
        }
        let mut environment = environment();
        for source in sources {
            let invalid = |reason: String| LoadError::Invalid { path: source.path.clone(), reason };
            if source.text.len() > TEMPLATE_BYTES_MAX {
                return Err(invalid(format!("chat template beyond {TEMPLATE_BYTES_MAX} bytes")));
            }
            let text = without_generation_tags(&source.text);
            let add = || environment.add_template_owned(source.name, text);
            contained(ENGINE, || add().map_err(|e| e.to_string()))
                .and_then(|added| added)
                .map_err(|reason| invalid(format!("chat template: {reason}")))?;
        }
        let guard = Guard::new(tokenizer.special_spellings())
            .map_err(|reason| LoadError::Invalid { path: dir.join("tokenizer.json"), reason })?;
        let special = tokenizer.special_tokens().to_vec();
        Ok(Some(Self { environment, guard, special, output_bytes_max }))
    }

    /// Compiles the template of a request.
    ///
    /// Errors: it is no template.
    pub fn of_request(
        text: &str,
        tokenizer: &Tokenizer,
        output_bytes_max: usize,
    ) -> Result<Self, TextError> {
        let mut environment = environment();
        let mut add = || environment.add_template_owned("default", without_generation_tags(text));
        contained(ENGINE, || add().map_err(|e| format!("{e:#}")))
            .and_then(|added| added)
            .map_err(TextError::NoTemplate)?;
        let guard = Guard::new(tokenizer.special_spellings()).map_err(TextError::Template)?;
        let special = tokenizer.special_tokens().to_vec();
        Ok(Self { environment, guard, special, output_bytes_max })
    }

    /// The template of conversations without tools.
    pub fn source(&self) -> Option<String> {
        let template = self.environment.get_template("default").ok()?;
        Some(template.source().to_owned())
    }

    /// Whether the model's template, in any of its forms, holds `text`.
    pub fn mentions(&self, text: &str) -> bool {
        self.environment.templates().any(|(_, template)| template.source().contains(text))
    }

    /// Renders one conversation.
    pub fn render(&self, mut input: ChatInput) -> Result<Rendered, TextError> {
        let kwargs = Value::Object(std::mem::take(&mut input.kwargs));
        let values = [&input.messages, &input.tools, &input.documents, &kwargs];
        let [sentinel, end] = unused_characters(&values)
            .ok_or_else(|| TextError::Template("no character left for a mark".to_owned()))?;
        if input.continue_final_message {
            let text = last_text(&mut input.messages).ok_or(TextError::NothingToContinue)?;
            // The space after the mark shows whether the template trims its messages.
            let _infallible = write!(text, "{end} ");
        }
        let mut context = Map::new();
        for (role, token) in &self.special {
            context.insert(role.clone(), Value::String(token.clone()));
        }
        let mut user = [input.messages, input.tools, input.documents, kwargs];
        for value in &mut user {
            self.guard.mark(value, sentinel);
        }
        let [messages, tools, documents, kwargs] = user;
        context.insert("messages".to_owned(), messages);
        if !tools.is_null() {
            context.insert("tools".to_owned(), tools.clone());
        }
        if !documents.is_null() {
            context.insert("documents".to_owned(), documents);
        }
        context.insert("add_generation_prompt".to_owned(), input.add_generation_prompt.into());
        if let Value::Object(kwargs) = kwargs {
            context.extend(kwargs);
        }
        let mut text = self.run(!tools.is_null(), &context)?;
        if input.continue_final_message {
            cut_at(&mut text, end)?;
        }
        Ok(unmark(text, sentinel))
    }

    fn run(&self, tools: bool, context: &Map<String, Value>) -> Result<String, TextError> {
        let named = if tools { self.environment.get_template("tool_use").ok() } else { None };
        let template = named.map_or_else(|| self.environment.get_template("default"), Ok);
        let template = template.map_err(|e| TextError::Template(e.to_string()))?;
        let mut out = Capped { bytes: Vec::new(), max: self.output_bytes_max, full: false };
        let render = || {
            let rendered = template.render_captured_to(context, &mut out);
            rendered.map(drop).map_err(|e| explain(&e))
        };
        if let Err(error) = contained(ENGINE, render).map_err(TextError::Template)? {
            let max = self.output_bytes_max;
            return Err(if out.full { TextError::TooLong(max) } else { error });
        }
        String::from_utf8(out.bytes).map_err(|e| TextError::Template(e.to_string()))
    }
}

/// A template and where it was found.
struct Source {
    name: String,
    text: String,
    path: std::path::PathBuf,
}

impl Source {
    /// `--chat-template`: a path that exists, else the template itself.
    fn chosen(chosen: &str) -> Result<Self, LoadError> {
        let path = Path::new(chosen);
        let literal = chosen.contains(['{', '}', '\n']);
        let text = match read(path) {
            Ok(Some(bytes)) => utf8(path, bytes)?,
            Err(error) if !literal => return Err(error),
            Ok(None) | Err(_) if literal => chosen.to_owned(),
            Ok(None) | Err(_) => return Err(LoadError::Missing(path.to_owned())),
        };
        Ok(Self { name: "default".to_owned(), text, path: path.to_owned() })
    }

    fn of_model(dir: &Path) -> Result<Vec<Self>, LoadError> {
        let path = dir.join("chat_template.jinja");
        if let Some(bytes) = read(&path)? {
            let text = utf8(&path, bytes)?;
            return Ok(vec![Self { name: "default".to_owned(), text, path }]);
        }
        for name in ["chat_template.json", "tokenizer_config.json"] {
            let path = dir.join(name);
            let Some(json) = read_json(&path)? else { continue };
            let found = Self::of_json(&json["chat_template"], &path)?;
            if !found.is_empty() {
                return Ok(found);
            }
        }
        Ok(Vec::new())
    }

    /// A string, or a list of `{"name", "template"}` with a default among them.
    fn of_json(json: &Value, path: &Path) -> Result<Vec<Self>, LoadError> {
        let source = |name: &str, text: &str| Self {
            name: name.to_owned(),
            text: text.to_owned(),
            path: path.to_owned(),
        };
        let invalid = |reason: &str| LoadError::Invalid {
            path: path.to_owned(),
            reason: format!("chat_template: {reason}"),
        };
        match json {
            Value::Null => Ok(Vec::new()),
            Value::String(text) => Ok(vec![source("default", text)]),
            Value::Array(list) => {
                let named = list.iter().map(|item| {
                    let name = item["name"].as_str();
                    let pair = name.zip(item["template"].as_str());
                    pair.map(|(name, text)| source(name, text))
                });
                let named: Option<Vec<Self>> = named.collect();
                let named = named.ok_or_else(|| invalid("an entry lacks name or template"))?;
                if named.iter().any(|s| s.name == "default") {
                    Ok(named)
                } else {
                    Err(invalid("no template is named default"))
                }
            }
            _ => Err(invalid("neither text nor a list")),
        }
    }
}

fn utf8(path: &Path, bytes: Vec<u8>) -> Result<String, LoadError> {
    String::from_utf8(bytes).map_err(|_| LoadError::Invalid {
        path: path.to_owned(),
        reason: "not valid UTF-8".to_owned(),
    })
}

/// The dialect of transformers.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_fuel(Some(FUEL));
    // Errors would show all variables, whose words end the process where a namespace holds itself.
    environment.set_debug(false);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_formatter(python_words);
    environment.add_filter("tojson", |value: Jinja, kwargs: Kwargs| tojson(&value, &kwargs));
    environment.add_function("raise_exception", |text: String| -> Result<Jinja, Error> {
        let raised = Error::new(ErrorKind::InvalidOperation, "raise_exception");
        Err(raised.with_source(Raised(text)))
    });
    environment.add_function("strftime_now", |format: String| strftime(&format, SystemTime::now()));
    environment
}

/// Containers nested deeper are not written: the library takes stack for each level, and a namespace may hold itself.
const DEPTH_MAX: usize = 256;

/// So many values are looked at before a container counts as too deep.
const LOOKS_MAX: usize = 1 << 20;

/// Whether no value inside is deeper than `levels`.
fn is_shallow(value: &Jinja, levels: usize, looks: &mut usize) -> bool {
    let is_map = value.kind() == ValueKind::Map;
    if !is_map && value.kind() != ValueKind::Seq {
        return true;
    }
    let Ok(items) = value.try_iter() else { return true };
    let mut items = items.map(|item| if is_map { value.get_item(&item) } else { Ok(item) });
    items.all(|item| {
        *looks = looks.saturating_sub(1);
        *looks > 0 && levels > 0 && item.is_ok_and(|item| is_shallow(&item, levels - 1, looks))
    })
}

/// Writes constants as Python does: `None`, `True`, `False`.
fn python_words(out: &mut Output<'_>, state: &State<'_, '_>, value: &Jinja) -> Result<(), Error> {
    if !is_shallow(value, DEPTH_MAX, &mut { LOOKS_MAX }) {
        return Err(Error::new(ErrorKind::InvalidOperation, "nested too deeply to be written"));
    }
    let word = match value.kind() {
        ValueKind::None => "None",
        ValueKind::Bool if value.is_true() => "True",
        ValueKind::Bool => "False",
        _ => return minijinja::escape_formatter(out, state, value),
    };
    out.write_str(word).map_err(Error::from)
}

/// What `raise_exception` was given.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn explain(error: &Error) -> TextError {
    if error.kind() == ErrorKind::OutOfFuel {
        return TextError::Fuel(FUEL);
    }
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(cause) = source {
        if let Some(Raised(text)) = cause.downcast_ref() {
            return TextError::Raised(text.chars().take(RAISED_CHARS).collect());
        }
        if cause.downcast_ref::<Error>().is_some_and(|e| e.kind() == ErrorKind::OutOfFuel) {
            return TextError::Fuel(FUEL);
        }
        source = cause.source();
    }
    TextError::Template(format!("{error:#}"))
}

/// Collects output up to a limit.
struct Capped {
    bytes: Vec<u8>,
    max: usize,
    full: bool,
}

impl io::Write for Capped {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > self.max {
            self.full = true;
            return Err(io::Error::other("output cap"));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The text to continue: the last message's content, or its last text part.
fn last_text(messages: &mut Value) -> Option<&mut String> {
    match messages.as_array_mut()?.last_mut()?.get_mut("content")? {
        Value::String(text) => Some(text),
        Value::Array(parts) => {
            let texts = parts.iter_mut().rev().find_map(|part| part.get_mut("text"));
            match texts {
                Some(Value::String(text)) => Some(text),
                _ => None,
            }
        }
        _ => None,
    }
}

/// Ends the text where the continued message ends. A template that trims its messages has
/// removed the space behind the mark; then the message's own trailing space goes too.
fn cut_at(text: &mut String, end: char) -> Result<(), TextError> {
    let at = text.rfind(end).ok_or(TextError::NothingToContinue)?;
    let spaced = text[at + end.len_utf8()..].starts_with(' ');
    text.truncate(at);
    if !spaced {
        text.truncate(text.trim_end().len());
    }
    Ok(())
}

/// `{% generation %}` only marks what to train on: it becomes a block that always renders, which
/// keeps the whitespace control of its tags.
fn without_generation_tags(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(open) = rest.find("{%") {
        // Behind the opening: in `{%}` one sign is not both.
        let Some(length) = rest[open + 2..].find("%}") else { break };
        let close = open + 2 + length;
        let tag = &rest[open + 2..close];
        let word = tag.trim_matches(['-', '+', ' ', '\t', '\n', '\r']);
        out.push_str(&rest[..open + 2]);
        match word {
            "generation" => out.push_str(&tag.replace(word, "if true")),
            "endgeneration" => out.push_str(&tag.replace(word, "endif")),
            _ => out.push_str(tag),
        }
        out.push_str("%}");
        rest = &rest[close + 2..];
    }
    out.push_str(rest);
    out
}
