//! Records which special variables a statement uses, for the enclosing macros and loops: Jinja2 passes
//! `caller`, `kwargs`, `varargs` and `loop` only to bodies that load them before assigning them.

use super::ast::UsedSpecialParameters;

/// Names of the special variables.
const SPECIAL: [&str; 4] = ["caller", "kwargs", "varargs", "loop"];

/// Whether a body first loads or first assigns a variable.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum FirstUse {
    #[default]
    None,
    Load,
    Store,
}

/// Tracks the uses of special variables in the enclosing bodies, outermost first.
#[derive(Debug, Default)]
pub(super) struct VariableUsageTracker {
    bodies: Vec<[FirstUse; SPECIAL.len()]>,
}

/// Special variables that a body uses.
#[derive(Debug, Clone, Copy)]
pub(super) struct BodyUsage {
    /// Special parameters of a macro.
    pub(super) parameters: UsedSpecialParameters,
    /// Whether the body uses `loop`.
    pub(super) uses_loop: bool,
}

impl VariableUsageTracker {
    /// Begins the body of a macro or a loop.
    pub(super) fn enter(&mut self) {
        self.bodies.push([FirstUse::None; SPECIAL.len()]);
    }

    /// Ends a body.
    pub(super) fn leave(&mut self) -> BodyUsage {
        let uses = self.bodies.pop().unwrap_or_default();
        let [caller, kwargs, varargs, uses_loop] = uses.map(|first| first == FirstUse::Load);
        BodyUsage { parameters: UsedSpecialParameters { caller, kwargs, varargs }, uses_loop }
    }

    /// Records that the variable `name` is loaded.
    pub(super) fn load(&mut self, name: &str) {
        self.record(name, FirstUse::Load);
    }

    /// Records that the variable `name` is assigned.
    pub(super) fn store(&mut self, name: &str) {
        self.record(name, FirstUse::Store);
    }

    fn record(&mut self, name: &str, first: FirstUse) {
        let Some(index) = SPECIAL.iter().position(|special| *special == name) else { return };
        for body in &mut self.bodies {
            if body[index] == FirstUse::None {
                body[index] = first;
            }
        }
    }
}
