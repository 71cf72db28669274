//! Formats with tags: `tag`, `triggered_tags`, `tags_with_separator` and `dispatch`.

use super::fields::FormatFields;
use super::formats::TagGrammarWriter;
use super::free_text::{TriggerBranch, TriggeredText};
use super::{EndTexts, LarkExpression, StructuralTagError};
use crate::lark_text::{literal, one_of};
use serde_json::Value;

/// Tag: content between a begin text and one of several end texts.
struct StructuralTag<'a> {
    begin: String,
    content: TagContent<'a>,
    ends: Vec<String>,
    begin_path: String,
    content_path: String,
}

/// Content of a tag.
enum TagContent<'a> {
    Format(&'a Value),
    /// JSON schema, used in the older form of structural tags.
    Schema(&'a Value),
}

impl<'a> StructuralTag<'a> {
    fn of(value: &'a Value, path: &str) -> Result<Self, StructuralTagError> {
        let mut fields = FormatFields::of(value, path)?;
        if fields.optional_text("type")?.is_some_and(|kind| kind != "tag") {
            return Err(StructuralTagError::new(fields.path("type"), "must be tag"));
        }
        let tag = Self::members(&mut fields)?;
        fields.finish()?;
        Ok(tag)
    }

    fn members(fields: &mut FormatFields<'a>) -> Result<Self, StructuralTagError> {
        let begin = fields.text("begin")?.to_owned();
        let content = TagContent::Format(fields.required("content")?);
        let ends = match fields.required("end")? {
            Value::String(end) if end.is_empty() => Vec::new(),
            Value::String(end) => vec![end.clone()],
            Value::Array(_) => fields.texts("end")?,
            _ => return Err(StructuralTagError::new(fields.path("end"), "must be a string")),
        };
        let (begin_path, content_path) = (fields.path("begin"), fields.path("content"));
        Ok(Self { begin, content, ends, begin_path, content_path })
    }
}

impl TagGrammarWriter {
    /// Writes the tag with the members `fields`. If the tag has no end text, its content ends with one of
    /// the texts `ends`.
    pub(super) fn tag(
        &mut self,
        fields: &mut FormatFields<'_>,
        ends: &EndTexts,
        depth: usize,
    ) -> Result<LarkExpression, StructuralTagError> {
        let tag = StructuralTag::members(fields)?;
        let begin = LarkExpression::Terminal(literal(&tag.begin));
        let rest = if tag.ends.is_empty()
            && let TagContent::Format(format) = &tag.content
        {
            self.closed(format, &tag.content_path, ends, depth)?
        } else {
            let rest = self.content(&tag, depth)?;
            self.ended(rest, ends)
        };
        Ok(self.concatenated(vec![begin, rest]))
    }

    /// Writes the content of a tag and its end text. Content that is free text needs an end text.
    fn content(
        &mut self,
        tag: &StructuralTag<'_>,
        depth: usize,
    ) -> Result<LarkExpression, StructuralTagError> {
        match tag.content {
            TagContent::Format(format) if tag.ends.is_empty() => {
                self.bounded(format, &tag.content_path, depth)
            }
            TagContent::Format(format) => self.closed(format, &tag.content_path, &tag.ends, depth),
            TagContent::Schema(schema) => {
                let content = self.json(schema, &tag.content_path)?;
                Ok(self.ended(content, &tag.ends))
            }
        }
    }

    /// Writes a format of type `triggered_tags`: free text in which each trigger must be followed by the
    /// rest of a tag.
    pub(super) fn triggered_tags(
        &mut self,
        fields: &mut FormatFields<'_>,
        ends: &EndTexts,
        depth: usize,
    ) -> Result<LarkExpression, StructuralTagError> {
        let triggers = fields.texts("triggers")?;
        let path = fields.path("tags");
        let tags = fields.list("tags")?.iter().enumerate();
        let tags = tags.map(|(index, tag)| StructuralTag::of(tag, &format!("{path}[{index}]")));
        let tags = tags.collect::<Result<Vec<_>, _>>()?;
        let excluded = fields.texts("excludes")?;
        let is_first_free = !fields.flag("at_least_one")?;
        let is_single = fields.flag("stop_after_first")?;
        let branches = self.branches(&triggers, &tags, depth)?;
        let dispatch = TriggeredText { branches, excluded, is_first_free, is_single };
        Ok(self.dispatch(dispatch, ends))
    }

    /// Assigns each tag to the trigger that is a prefix of its begin text.
    fn branches(
        &mut self,
        triggers: &[String],
        tags: &[StructuralTag<'_>],
        depth: usize,
    ) -> Result<Vec<TriggerBranch>, StructuralTagError> {
        let mut branches: Vec<TriggerBranch> = triggers
            .iter()
            .map(|trigger| TriggerBranch { trigger: trigger.clone(), rests: Vec::new() })
            .collect();
        for tag in tags {
            let matching = |branch: &TriggerBranch| tag.begin.starts_with(&branch.trigger);
            if branches.iter().filter(|branch| matching(branch)).count() != 1 {
                let message = "must begin with exactly one trigger";
                return Err(StructuralTagError::new(&*tag.begin_path, message));
            }
            let rest = self.content(tag, depth)?;
            for branch in branches.iter_mut().filter(|branch| matching(branch)) {
                let begin = literal(&tag.begin[branch.trigger.len()..]);
                let begin = LarkExpression::Terminal(begin);
                let whole = self.concatenated(vec![begin, rest.clone()]);
                branch.rests.push(self.rule_expression(whole));
            }
        }
        branches.retain(|branch| !branch.rests.is_empty());
        Ok(branches)
    }

    /// Writes a format of type `tags_with_separator`: tags with a separator between them.
    pub(super) fn tags_with_separator(
        &mut self,
        fields: &mut FormatFields<'_>,
        depth: usize,
    ) -> Result<LarkExpression, StructuralTagError> {
        let separator = literal(fields.text("separator")?);
        let path = fields.path("tags");
        let mut alternatives = Vec::new();
        for (index, tag) in fields.list("tags")?.iter().enumerate() {
            let tag = StructuralTag::of(tag, &format!("{path}[{index}]"))?;
            let begin = LarkExpression::Terminal(literal(&tag.begin));
            let rest = self.content(&tag, depth)?;
            let whole = self.concatenated(vec![begin, rest]);
            alternatives.push(self.rule_expression(whole));
        }
        let tag = self.rule(&alternatives.join(" | "));
        let more = if fields.flag("stop_after_first")? {
            String::new()
        } else {
            format!("({separator} {tag})*")
        };
        let optional = if fields.flag("at_least_one")? { "" } else { "?" };
        Ok(LarkExpression::Rule(format!("({tag} {more}){optional}")))
    }

    /// Writes a format of type `dispatch`: free text in which each pattern must be followed by the format
    /// of the pattern.
    pub(super) fn pattern_dispatch(
        &mut self,
        fields: &mut FormatFields<'_>,
        ends: &EndTexts,
        depth: usize,
    ) -> Result<LarkExpression, StructuralTagError> {
        let path = fields.path("rules");
        let mut branches = Vec::new();
        for (index, rule) in fields.list("rules")?.iter().enumerate() {
            let path = format!("{path}[{index}]");
            let pair = rule.as_array().filter(|pair| pair.len() == 2);
            let pattern = pair.and_then(|pair| pair[0].as_str()).filter(|text| !text.is_empty());
            let (Some(pair), Some(pattern)) = (pair, pattern) else {
                return Err(StructuralTagError::new(path, "must be a string and a format"));
            };
            let rest = self.bounded(&pair[1], &format!("{path}[1]"), depth)?;
            let rests = vec![self.rule_expression(rest)];
            branches.push(TriggerBranch { trigger: pattern.to_owned(), rests });
        }
        let excluded = fields.texts("excludes")?;
        fields.reject("loop", |value| *value == Value::Bool(true))?;
        let dispatch = TriggeredText { branches, excluded, is_first_free: true, is_single: false };
        Ok(self.dispatch(dispatch, ends))
    }

    /// Writes the older form of a structural tag: `structures`, each with a schema, and `triggers`.
    pub(super) fn structures(
        &mut self,
        fields: &mut FormatFields<'_>,
    ) -> Result<LarkExpression, StructuralTagError> {
        let triggers = fields.texts("triggers")?;
        let mut tags = Vec::new();
        for (index, structure) in fields.list("structures")?.iter().enumerate() {
            let mut fields = FormatFields::of(structure, &format!("structures[{index}]"))?;
            let (begin, end) = (fields.text("begin")?.to_owned(), fields.text("end")?.to_owned());
            let content = TagContent::Schema(fields.required("schema")?);
            fields.finish()?;
            let ends = if end.is_empty() { Vec::new() } else { vec![end] };
            let (begin_path, content_path) = (fields.path("begin"), fields.path("schema"));
            tags.push(StructuralTag { begin, content, ends, begin_path, content_path });
        }
        let branches = self.branches(&triggers, &tags, 0)?;
        let excluded = Vec::new();
        let dispatch = TriggeredText { branches, excluded, is_first_free: true, is_single: false };
        Ok(self.dispatch(dispatch, &[]))
    }

    /// Returns the Lark expression `expression` followed by one of the texts `ends`.
    pub(super) fn ended(&mut self, expression: LarkExpression, ends: &EndTexts) -> LarkExpression {
        if ends.is_empty() {
            return expression;
        }
        self.concatenated(vec![expression, LarkExpression::Terminal(one_of(ends))])
    }
}
