//! Parser of a template: its state, and the sequence of its statements.

use super::ast::{BlockNode, JinjaStatement, NameId, StatementList, StatementNode};
use super::error::{JinjaError, JinjaResult};
use super::lexer::tokenize;
use super::token::{JinjaToken, JinjaTokenValue};
use super::variable_usage::VariableUsageTracker;
use std::collections::HashMap;
use std::sync::Arc;

/// Maximum nesting of statements. It is the limit of Jinja2, which compiles templates to Python: Python
/// permits 100 levels of indentation.
const STATEMENT_DEPTH_MAX: u32 = 100;

/// Syntax tree of a template with its names and blocks.
#[derive(Debug)]
pub(crate) struct ParsedTemplate {
    /// Statements.
    pub(crate) body: StatementList,
    /// Variable names; a `NameId` is an index into this list.
    pub(crate) names: Vec<Arc<str>>,
    /// Named blocks.
    pub(crate) blocks: Vec<Arc<BlockNode>>,
}

/// Parses the template `source`.
///
/// Errors: the template is invalid, or nested too deeply.
pub(crate) fn parse(source: &str) -> JinjaResult<ParsedTemplate> {
    let mut parser = TemplateParser {
        tokens: tokenize(source)?,
        at: 0,
        names: Vec::new(),
        name_ids: HashMap::new(),
        blocks: Vec::new(),
        usage: VariableUsageTracker::default(),
        place: StatementContext {
            depth: 0,
            loops: 0,
            enclosing_loops: 0,
            is_soft: false,
            is_top: true,
        },
        nesting: 0,
        height: 0,
        unknown_names: Vec::new(),
    };
    let body = parser.statements_until(&[])?;
    if let Some(error) = parser.unknown_names.into_iter().next() {
        return Err(error);
    }
    Ok(ParsedTemplate { body, names: parser.names, blocks: parser.blocks })
}

/// Context of the statement being parsed.
#[derive(Debug, Clone, Copy)]
pub(super) struct StatementContext {
    /// Nesting of statements.
    pub(super) depth: u32,
    /// Number of enclosing loops that `break` and `continue` may refer to.
    pub(super) loops: u32,
    /// Number of enclosing loops, including those outside the enclosing macro.
    pub(super) enclosing_loops: u32,
    /// Whether an unknown filter or test is an error only when it is evaluated, not when it is parsed.
    pub(super) is_soft: bool,
    /// Whether the statement is outside of loops, macros and scopes.
    pub(super) is_top: bool,
}

/// Parser of a template.
pub(super) struct TemplateParser {
    tokens: Vec<JinjaToken>,
    at: usize,
    names: Vec<Arc<str>>,
    name_ids: HashMap<Arc<str>, NameId>,
    pub(super) blocks: Vec<Arc<BlockNode>>,
    pub(super) usage: VariableUsageTracker,
    pub(super) place: StatementContext,
    /// Nesting depth of the expression being parsed.
    pub(super) nesting: u32,
    /// Tree height of the last parsed expression.
    pub(super) height: u32,
    /// Errors of filters and tests that do not exist.
    pub(super) unknown_names: Vec<JinjaError>,
}

impl TemplateParser {
    /// Current token.
    pub(super) fn current(&self) -> &JinjaTokenValue {
        &self.tokens[self.at].kind
    }

    /// Token after the current one.
    pub(super) fn following(&self) -> &JinjaTokenValue {
        &self.tokens[(self.at + 1).min(self.tokens.len() - 1)].kind
    }

    /// Line of the current token.
    pub(super) fn line(&self) -> u32 {
        self.tokens[self.at].line
    }

    /// Moves to the next token.
    pub(super) fn advance(&mut self) {
        self.at = (self.at + 1).min(self.tokens.len() - 1);
    }

    /// Creates an error at the current token.
    pub(super) fn fail(&self, message: impl Into<String>) -> JinjaError {
        JinjaError::syntax(message, self.line())
    }

    fn unexpected(&self, expected: &str) -> JinjaError {
        match self.current() {
            JinjaTokenValue::End => {
                self.fail(format!("unexpected end of template, expected '{expected}'."))
            }
            found => self.fail(format!("expected token '{expected}', got '{found}'")),
        }
    }

    /// Moves past the current token if it is the operator `operator`; returns whether it is.
    pub(super) fn skip_operator(&mut self, operator: &str) -> bool {
        let found = self.current().is_operator(operator);
        if found {
            self.advance();
        }
        found
    }

    /// Moves past the current token if it is the name `name`; returns whether it is.
    pub(super) fn skip_name(&mut self, name: &str) -> bool {
        let found = self.current().is_name(name);
        if found {
            self.advance();
        }
        found
    }

    /// Moves past the current token, which must be the operator `operator`.
    pub(super) fn expect_operator(&mut self, operator: &str) -> JinjaResult<()> {
        if self.skip_operator(operator) { Ok(()) } else { Err(self.unexpected(operator)) }
    }

    /// Moves past the current token, which must be the name `name`.
    pub(super) fn expect_name(&mut self, name: &str) -> JinjaResult<()> {
        if self.skip_name(name) { Ok(()) } else { Err(self.unexpected(name)) }
    }

    /// Reads any name.
    pub(super) fn name(&mut self) -> JinjaResult<Arc<str>> {
        let JinjaTokenValue::Name(name) = self.current() else {
            return Err(self.unexpected("name"));
        };
        let name = Arc::clone(name);
        self.advance();
        Ok(name)
    }

    /// Returns the id of a name; a new name is added to the list of names.
    pub(super) fn name_id(&mut self, name: &Arc<str>) -> NameId {
        if let Some(&id) = self.name_ids.get(name) {
            return id;
        }
        let id = NameId(self.names.len() as u32);
        self.names.push(Arc::clone(name));
        self.name_ids.insert(Arc::clone(name), id);
        id
    }

    /// Parses statements up to a tag whose name is one of `ends`, which becomes the current token, or to the
    /// end of the template.
    fn statements_until(&mut self, ends: &[&str]) -> JinjaResult<StatementList> {
        let mut body = StatementList::new();
        loop {
            let line = self.line();
            let statement = match self.current() {
                JinjaTokenValue::End if ends.is_empty() => return Ok(body),
                JinjaTokenValue::End => {
                    let message = format!(
                        "Unexpected end of template. Jinja was looking for the following tags: '{}'.",
                        ends.join("' or '")
                    );
                    return Err(self.fail(message));
                }
                JinjaTokenValue::Data(text) => {
                    let text = Arc::clone(text);
                    self.advance();
                    JinjaStatement::Data(text)
                }
                JinjaTokenValue::VariableBegin => {
                    self.advance();
                    let value = self.tuple_expression(true)?;
                    if *self.current() != JinjaTokenValue::VariableEnd {
                        return Err(self.unexpected("end of print statement"));
                    }
                    self.advance();
                    JinjaStatement::Print(value)
                }
                _ => {
                    self.advance();
                    if ends.iter().any(|end| self.current().is_name(end)) {
                        return Ok(body);
                    }
                    self.place.depth += 1;
                    if self.place.depth > STATEMENT_DEPTH_MAX {
                        return Err(self.fail("too many levels of nested statements"));
                    }
                    let parsed = self.statement(&mut body)?;
                    self.place.depth -= 1;
                    self.block_end()?;
                    match parsed {
                        Some(statement) => statement,
                        None => continue,
                    }
                }
            };
            body.push(StatementNode { statement, line });
        }
    }

    fn block_end(&mut self) -> JinjaResult<()> {
        if *self.current() != JinjaTokenValue::BlockEnd {
            return Err(self.unexpected("end of statement block"));
        }
        self.advance();
        Ok(())
    }

    /// Parses the end of a tag, then statements up to a tag whose name is one of `ends`. Afterwards the name
    /// of that tag is the current token.
    pub(super) fn body(&mut self, ends: &[&str]) -> JinjaResult<StatementList> {
        self.skip_operator(":");
        self.block_end()?;
        self.statements_until(ends)
    }

    /// Parses statements up to the tag `end`, and moves past its name.
    pub(super) fn body_to(&mut self, end: &str) -> JinjaResult<StatementList> {
        let body = self.body(&[end])?;
        self.advance();
        Ok(body)
    }

    /// Runs `parse` in a context modified by `change`, then restores the previous context.
    pub(super) fn within<T>(
        &mut self,
        change: impl FnOnce(&mut StatementContext),
        parse: impl FnOnce(&mut Self) -> JinjaResult<T>,
    ) -> JinjaResult<T> {
        let place = self.place;
        change(&mut self.place);
        let parsed = parse(self);
        self.place = place;
        parsed
    }

    /// Parses statements that have a new variable scope, up to the tag `end`.
    pub(super) fn scoped_body(&mut self, end: &str) -> JinjaResult<StatementList> {
        let inner = |place: &mut StatementContext| {
            place.is_soft = false;
            place.is_top = false;
        };
        self.within(inner, |parser| parser.body_to(end))
    }

    /// Parses a statement after `{%`. For `{% print %}`, appends the printed values to `body` and returns
    /// `None`.
    fn statement(&mut self, body: &mut StatementList) -> JinjaResult<Option<JinjaStatement>> {
        let JinjaTokenValue::Name(tag) = self.current() else {
            return Err(self.fail("tag name expected"));
        };
        let tag = Arc::clone(tag);
        let line = self.line();
        self.advance();
        let statement = match &*tag {
            "for" => self.for_statement()?,
            "if" => self.if_statement()?,
            "set" => self.set_statement()?,
            "macro" => self.macro_statement()?,
            "call" => self.call_statement()?,
            "generation" => JinjaStatement::Generation(self.generation_body()?),
            "filter" => {
                let filter = self.filter_chain(None, true)?;
                JinjaStatement::FilterBlock(filter, self.scoped_body("endfilter")?)
            }
            "with" => self.with_statement()?,
            "block" => self.block_statement()?,
            "autoescape" => {
                let value = self.expression(true)?;
                JinjaStatement::Autoescape(value, self.scoped_body("endautoescape")?)
            }
            "break" | "continue" => {
                if self.place.loops == 0 {
                    return Err(JinjaError::syntax(format!("'{tag}' outside loop"), line));
                }
                if &*tag == "break" { JinjaStatement::Break } else { JinjaStatement::Continue }
            }
            "extends" | "include" | "import" | "from" => self.load_statement(&tag)?,
            "print" => {
                while *self.current() != JinjaTokenValue::BlockEnd {
                    let value = self.expression(true)?;
                    body.push(StatementNode { statement: JinjaStatement::Print(value), line });
                    if *self.current() != JinjaTokenValue::BlockEnd {
                        self.expect_operator(",")?;
                    }
                }
                return Ok(None);
            }
            _ => {
                let message = format!("Encountered unknown tag '{tag}'.");
                return Err(JinjaError::syntax(message, line));
            }
        };
        Ok(Some(statement))
    }
}
