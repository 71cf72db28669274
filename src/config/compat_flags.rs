//! Flags of vLLM, SGLang and ATOM without an equivalent in Hadron. Some are accepted without effect, the
//! others are rejected with a reason. Names are in kebab case without leading dashes.

pub(super) mod unsupported_flags;

pub(super) use unsupported_flags::{
    NO_OP_VALUES, UNSUPPORTED_FLAGS, is_no_op_value, unsupported_reason,
};

/// Flag that is accepted without effect; the log notes it.
pub(super) struct NoEffectFlag {
    pub(super) name: &'static str,
    /// Values that the flag accepts.
    value: NoEffectFlagValue,
    /// Reason why the flag has no effect.
    pub(super) reason: &'static str,
}

/// Values that a flag without effect accepts.
enum NoEffectFlagValue {
    Nothing,
    Anything,
    /// The flag is accepted with these values only; other values are rejected.
    OneOf(&'static [&'static str]),
}

const fn inert_flag(
    name: &'static str,
    value: NoEffectFlagValue,
    reason: &'static str,
) -> NoEffectFlag {
    NoEffectFlag { name, value, reason }
}

impl NoEffectFlag {
    pub(super) fn takes_value(&self) -> bool {
        !matches!(self.value, NoEffectFlagValue::Nothing)
    }

    /// Whether this flag is accepted with the value `value`, without effect.
    pub(super) fn is_inert_with(&self, value: &str) -> bool {
        match self.value {
            NoEffectFlagValue::Nothing | NoEffectFlagValue::Anything => true,
            NoEffectFlagValue::OneOf(values) => values.contains(&value),
        }
    }
}

/// Flags of vLLM, SGLang and ATOM that are accepted without effect, so that existing command lines work.
pub(super) const INERT_FLAGS: &[NoEffectFlag] = &[
    inert_flag(
        "trust-remote-code",
        NoEffectFlagValue::Nothing,
        "code from a model folder is never executed",
    ),
    inert_flag("enable-auto-tool-choice", NoEffectFlagValue::Nothing, "always on"),
    inert_flag("enable-chunked-prefill", NoEffectFlagValue::Nothing, "always on"),
    inert_flag(
        "api-server-count",
        NoEffectFlagValue::Anything,
        "one process serves all connections",
    ),
    inert_flag("async-scheduling", NoEffectFlagValue::Nothing, "always on"),
    inert_flag(
        "distributed-executor-backend",
        NoEffectFlagValue::OneOf(&["mp", "uni"]),
        "executors are processes or a thread of this server",
    ),
    inert_flag("uvicorn-log-level", NoEffectFlagValue::Anything, "uvicorn is not used"),
    inert_flag("disable-uvicorn-access-log", NoEffectFlagValue::Nothing, "uvicorn is not used"),
    inert_flag(
        "timeout-keep-alive",
        NoEffectFlagValue::Anything,
        "idle connections close after 60 s",
    ),
    inert_flag("level", NoEffectFlagValue::Anything, "there are no compilation levels"),
    inert_flag(
        "optimization-level",
        NoEffectFlagValue::Anything,
        "there are no compilation levels",
    ),
    inert_flag(
        "disable-access-log-for-endpoints",
        NoEffectFlagValue::Anything,
        "probes and scrapes are not logged",
    ),
    inert_flag("enable-request-id-headers", NoEffectFlagValue::Nothing, "always on"),
    inert_flag("enable-server-load-tracking", NoEffectFlagValue::Nothing, "always on"),
    inert_flag(
        "enable-scale-out",
        NoEffectFlagValue::Nothing,
        "/v1/chat/completions/render and /v1/completions/render are always enabled",
    ),
    inert_flag("language-model-only", NoEffectFlagValue::Nothing, "only text models are supported"),
    inert_flag("use-tqdm-on-load", NoEffectFlagValue::Nothing, "progress is shown on terminals"),
];
