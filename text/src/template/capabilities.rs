//! Determines by trial renderings which forms of messages a chat template accepts and includes in its output.
//! A trial renders a short conversation; the template shows a text if the output contains it.

use super::trial::{
    ArgumentsForm, CallMessageContent, ContentForm, ContentTrialOutcomes, TrialOutcome,
    TrialRenderer, shows_call, shows_call_repr, shows_call_text,
};

/// Role of the trial message that represents all roles without a field in `TemplateCapabilities`.
const UNLISTED_ROLE: &str = "qzxrole";

/// Forms of message content that a template includes in its output, for one role.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct RoleCapability {
    /// Whether the output contains message content that is a string.
    pub(super) text: bool,
    /// Whether the output contains the content given as a list of parts in every trial in which it contains
    /// the same content given as a string.
    pub(super) parts: bool,
    /// Whether the output contains a message of the role in its usual position in a conversation.
    pub(super) shown_first: bool,
    /// Whether at least one trial rendering with a message of the role succeeded.
    rendered: bool,
}

impl RoleCapability {
    /// Capability assumed for a role that the trial renderings do not cover: content is a string.
    pub(super) const ONLY_TEXT: Self =
        Self { text: true, parts: false, shown_first: false, rendered: false };

    /// Whether the output contains the messages of the role in at least one form.
    pub(super) fn is_shown(self) -> bool {
        self.text || self.parts
    }

    /// Whether the template omits the messages of the role without an error.
    pub(super) fn is_hidden(self) -> bool {
        self.rendered && !self.is_shown()
    }

    fn context_form(self) -> ContentForm {
        if self.parts && !self.text { ContentForm::Parts } else { ContentForm::Text }
    }
}

/// Forms of messages that a template accepts and includes in its output.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct TemplateCapabilities {
    system: RoleCapability,
    developer: RoleCapability,
    user: RoleCapability,
    assistant: RoleCapability,
    tool: RoleCapability,
    unlisted: RoleCapability,
    /// Form of the arguments of tool calls that the template expects.
    pub(super) arguments: ArgumentsForm,
    /// Whether the output contains the tool calls of earlier messages.
    pub(super) shows_calls: bool,
    /// Whether a tool call must be a message with the name of the function in `metadata`.
    pub(super) takes_metadata: bool,
    /// Capability for the role `observation`, if messages of the role `tool` must get this role.
    pub(super) observation: Option<RoleCapability>,
    /// Whether the template accepts a message that has tool calls but no content.
    pub(super) absent_content: bool,
    /// Whether the output contains the tool definitions of a request.
    pub(super) shows_tools: bool,
}

impl TemplateCapabilities {
    /// Determines the capabilities of a template by trial renderings.
    pub(super) fn of(trial: &TrialRenderer<'_>) -> Self {
        let user_of = |other| role_capability(trial, "user", other, ArgumentsForm::default());
        let mut user = user_of(ContentForm::Text);
        if !user.text && user.parts {
            user = user_of(ContentForm::Parts);
        }
        let other = user.context_form();
        let (mut arguments, shows_calls) = arguments_form(trial, other);
        let takes_metadata = !shows_calls && trial.shows_metadata(other);
        if takes_metadata {
            arguments = ArgumentsForm::Text;
        }
        let role = |role: &str| role_capability(trial, role, other, arguments);
        let tool = role("tool");
        let observation = Some(tool).filter(|tool| !tool.is_shown()).map(|_| role("observation"));
        Self {
            system: role("system"),
            developer: role("developer"),
            user,
            assistant: role("assistant"),
            tool,
            unlisted: role(UNLISTED_ROLE),
            arguments,
            shows_calls: shows_calls || takes_metadata,
            takes_metadata,
            observation: observation.filter(|observation| observation.is_shown()),
            absent_content: accepts_absent_content(trial, arguments, other),
            shows_tools: trial.shows_tools(other),
        }
    }

    /// Returns the capability for a role; `None` if the trial renderings do not determine it.
    pub(super) fn role(&self, role: &str) -> Option<RoleCapability> {
        Some(match role {
            "system" => self.system,
            "developer" => self.developer,
            "user" => self.user,
            "assistant" => self.assistant,
            "tool" => self.tool,
            // The template omits the trial role, but it may support this role, because some templates check
            // roles against a list.
            _ if self.unlisted.is_hidden() => return None,
            _ => self.unlisted,
        })
    }

    /// Returns the capability for system messages if developer messages must become system messages: the template
    /// renders system messages but not developer messages.
    pub(super) fn system_for_developer(&self) -> Option<RoleCapability> {
        (!self.developer.shown_first && self.system.shown_first).then_some(self.system)
    }

    /// Whether the output contains user messages. If not, the template does not render conversations in the
    /// usual way, and the trial renderings give no information about other roles.
    pub(super) fn shows_users(&self) -> bool {
        self.user.is_shown()
    }
}

fn role_capability(
    trial: &TrialRenderer<'_>,
    role: &str,
    other: ContentForm,
    arguments: ArgumentsForm,
) -> RoleCapability {
    let trials = trial.message(role, other, arguments);
    let shown = |outcome: TrialOutcome| outcome == TrialOutcome::Shown;
    let only_text = |trial: &ContentTrialOutcomes| shown(trial.text) && !shown(trial.parts);
    let failed = |trial: &ContentTrialOutcomes| {
        trial.text == TrialOutcome::Failed && trial.parts == TrialOutcome::Failed
    };
    RoleCapability {
        text: trials.iter().any(|trial| shown(trial.text)),
        parts: trials.iter().any(|trial| shown(trial.parts)) && !trials.iter().any(only_text),
        shown_first: trials.first().is_some_and(|trial| shown(trial.text) || shown(trial.parts)),
        rendered: !trials.iter().all(failed),
    }
}

/// Returns the form in which the template takes the arguments of tool calls, and whether the output contains
/// the arguments. An object is preferred, unless the template prints an object as a Python value and prints
/// text unchanged.
fn arguments_form(trial: &TrialRenderer<'_>, other: ContentForm) -> (ArgumentsForm, bool) {
    let outputs = |form| {
        let contents = [CallMessageContent::Empty, CallMessageContent::Absent];
        let outputs = contents.map(|content| trial.calls(form, content, other));
        outputs.into_iter().flatten().collect::<Vec<String>>()
    };
    let (objects, texts) = (outputs(ArgumentsForm::Object), outputs(ArgumentsForm::Text));
    let shows = |outputs: &[String]| outputs.iter().any(|output| shows_call(output));
    let prints_repr = objects.iter().any(|output| shows_call_repr(output));
    if shows(&objects) && !prints_repr {
        (ArgumentsForm::Object, true)
    } else if texts.iter().any(|output| shows_call_text(output)) {
        (ArgumentsForm::Text, true)
    } else if shows(&objects) || !shows(&texts) {
        (ArgumentsForm::Object, shows(&objects))
    } else {
        (ArgumentsForm::Text, true)
    }
}

/// Whether the template accepts a message that has tool calls but no content: the template does not fail,
/// prints `None` and `null` no more often than with empty content, and prints the tool call if it does so
/// with empty content.
fn accepts_absent_content(
    trial: &TrialRenderer<'_>,
    arguments: ArgumentsForm,
    other: ContentForm,
) -> bool {
    let nulls = |output: &String| output.matches("None").count() + output.matches("null").count();
    let absent = trial.calls(arguments, CallMessageContent::Absent, other);
    let empty = trial.calls(arguments, CallMessageContent::Empty, other);
    let all_shown = |outputs: &[String]| outputs.iter().all(|output| shows_call(output));
    absent.len() >= empty.len()
        && !absent.is_empty()
        && absent.iter().map(nulls).sum::<usize>() <= empty.iter().map(nulls).sum::<usize>()
        && all_shown(&absent) == all_shown(&empty)
}
