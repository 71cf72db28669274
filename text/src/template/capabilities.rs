//! Message forms that a chat template accepts and shows, determined by trial renderings.

use super::trial::{
    ArgumentsForm, CallMessageContent, ContentForm, ContentTrialOutcomes, TrialOutcome,
    TrialRenderer, shows_call, shows_call_repr, shows_call_text,
};

/// Role used in the trials for all roles that are not listed in `TemplateCapabilities`.
const UNLISTED_ROLE: &str = "qzxrole";

/// Forms of content that a template shows in the messages of one role.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct RoleCapability {
    /// Whether the template shows content that is a string.
    pub(super) text: bool,
    /// Whether the template shows content given as a list of parts in every case in which it shows a string.
    pub(super) parts: bool,
    /// Whether the template shows a message of the role in its usual position.
    pub(super) shown_first: bool,
    /// Whether a trial was rendered without an error.
    rendered: bool,
}

impl RoleCapability {
    /// Capability assumed for a role that the trials do not cover.
    pub(super) const ONLY_TEXT: Self =
        Self { text: true, parts: false, shown_first: false, rendered: false };

    /// Whether the template shows the messages of the role in at least one form.
    pub(super) fn is_shown(self) -> bool {
        self.text || self.parts
    }

    /// Whether the template silently omits the messages of the role.
    pub(super) fn is_hidden(self) -> bool {
        self.rendered && !self.is_shown()
    }

    fn context_form(self) -> ContentForm {
        if self.parts && !self.text { ContentForm::Parts } else { ContentForm::Text }
    }
}

/// Message forms that a template accepts and shows.
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
    /// Whether the template shows the tool calls of earlier messages.
    pub(super) shows_calls: bool,
    /// Whether a message with tool calls may have no content.
    pub(super) absent_content: bool,
    /// Whether the template shows the tools of a request.
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
        let (arguments, shows_calls) = arguments_form(trial, other);
        let role = |role: &str| role_capability(trial, role, other, arguments);
        Self {
            system: role("system"),
            developer: role("developer"),
            user,
            assistant: role("assistant"),
            tool: role("tool"),
            unlisted: role(UNLISTED_ROLE),
            arguments,
            shows_calls,
            absent_content: accepts_absent_content(trial, arguments, other),
            shows_tools: trial.shows_tools(other),
        }
    }

    /// Returns the capability for a role; `None` if the trials do not cover the role.
    pub(super) fn role(&self, role: &str) -> Option<RoleCapability> {
        Some(match role {
            "system" => self.system,
            "developer" => self.developer,
            "user" => self.user,
            "assistant" => self.assistant,
            "tool" => self.tool,
            // A template that checks roles against a list may support this role, although it omits the trial
            // role.
            _ if self.unlisted.is_hidden() => return None,
            _ => self.unlisted,
        })
    }

    /// Whether the template shows user messages. If not, the template does not show messages in the usual
    /// way, and the trials give no information about other roles.
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

/// Returns the form in which the template takes the arguments of tool calls, and whether it shows them. An
/// object is preferred, unless the template prints an object as a Python value and prints text unchanged.
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

/// Whether a message with tool calls may have no content: without content the template does not fail, prints
/// neither `None` nor `null`, and prints no less of the call than with empty content.
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
