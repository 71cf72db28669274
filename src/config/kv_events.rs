//! Flag `--kv-events-config JSON`, with the keys of vLLM and further keys of Hadron.

use std::time::Duration;

use clap::{Args, ValueEnum};
use metrics::kv_events::{BindMode, InitialSequenceNumber, KvEventFormat, KvEventsConfig};
use serde::Deserialize;

use super::{CommandLineError, rejected};

/// Upper limit of the configurable number of batches in the replay buffer and in the publisher's queue.
const BATCHES_MAX: usize = 1_000_000;
/// Upper limit of the configurable heartbeat interval, in seconds: one day.
const IDLE_HEARTBEAT_MAX_S: f64 = 86_400.0;

/// Flags for KV events, by which changes of the prefix index are published.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "KV events")]
pub struct KvEventsArgs {
    /// Publish changes of the prefix index over ZMQ, e.g. {"enable_kv_cache_events": true, "replay_endpoint":
    /// "tcp://127.0.0.1:5558"}; see docs/kv-events.md
    #[arg(long, value_parser = config, value_name = "JSON")]
    kv_events_config: Option<KvEventsConfigJson>,
    /// Encoding of events: map as of vLLM 0.24, array as in earlier versions
    #[arg(long, value_name = "FORMAT")]
    kv_events_format: Option<KvEventFormatArg>,
}

impl KvEventsArgs {
    /// Returns the configuration of the publisher; `None` = KV events are disabled.
    pub fn enabled(&self) -> Option<KvEventsConfig> {
        let object = self.kv_events_config.clone().filter(KvEventsConfigJson::is_enabled)?;
        Some(object.into_config(self.kv_events_format))
    }

    /// Rejects `--kv-events-format` if KV events are disabled.
    pub(super) fn check(&self) -> Result<(), CommandLineError> {
        if self.kv_events_format.is_some() && self.enabled().is_none() {
            return rejected(
                "--kv-events-format: events are disabled without \
                 --kv-events-config '{\"enable_kv_cache_events\": true}'",
            );
        }
        Ok(())
    }
}

/// JSON value of `--kv-events-config`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct KvEventsConfigJson {
    enable_kv_cache_events: bool,
    publisher: Option<PublisherKind>,
    endpoint: String,
    replay_endpoint: Option<String>,
    buffer_steps: usize,
    hwm: i32,
    max_queue_size: usize,
    max_queue_bytes: u64,
    topic: String,
    bind: BindModeJson,
    format: KvEventFormatArg,
    sequence_start: InitialSequenceNumberJson,
    idle_beat_s: f64,
    token_ids: bool,
}

/// Transport of KV events; `null` disables them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
enum PublisherKind {
    #[serde(rename = "zmq")]
    Zmq,
    #[serde(rename = "null")]
    Null,
}

/// JSON value of `bind`: whether the publisher binds its endpoint (true), connects to it (false), or decides
/// by the address ("auto").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
enum BindModeJson {
    Forced(bool),
    Named(BindAutoKeyword),
}

/// The JSON string "auto" as a value of `bind`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
enum BindAutoKeyword {
    #[serde(rename = "auto")]
    Auto,
}

impl From<BindModeJson> for BindMode {
    fn from(text: BindModeJson) -> Self {
        match text {
            BindModeJson::Forced(true) => Self::Bind,
            BindModeJson::Forced(false) => Self::Connect,
            BindModeJson::Named(BindAutoKeyword::Auto) => Self::Auto,
        }
    }
}

/// Encoding of KV events in MessagePack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
enum KvEventFormatArg {
    /// MessagePack maps, as of vLLM 0.24
    Map,
    /// MessagePack arrays with the tag as first element, as before vLLM 0.24
    Array,
}

impl From<KvEventFormatArg> for KvEventFormat {
    fn from(format: KvEventFormatArg) -> Self {
        match format {
            KvEventFormatArg::Map => Self::Map,
            KvEventFormatArg::Array => Self::Array,
        }
    }
}

/// First sequence number of a publisher: derived from the clock, or zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum InitialSequenceNumberJson {
    Clock,
    Zero,
}

impl From<InitialSequenceNumberJson> for InitialSequenceNumber {
    fn from(text: InitialSequenceNumberJson) -> Self {
        match text {
            InitialSequenceNumberJson::Clock => Self::Clock,
            InitialSequenceNumberJson::Zero => Self::Zero,
        }
    }
}

impl Default for KvEventsConfigJson {
    fn default() -> Self {
        Self {
            enable_kv_cache_events: false,
            publisher: Some(PublisherKind::Zmq),
            endpoint: "tcp://127.0.0.1:5557".to_owned(),
            replay_endpoint: None,
            buffer_steps: 10_000,
            hwm: 100_000,
            max_queue_size: 100_000,
            max_queue_bytes: 256 << 20,
            topic: String::new(),
            bind: BindModeJson::Named(BindAutoKeyword::Auto),
            format: KvEventFormatArg::Map,
            sequence_start: InitialSequenceNumberJson::Clock,
            idle_beat_s: 0.0,
            token_ids: true,
        }
    }
}

impl KvEventsConfigJson {
    fn is_enabled(&self) -> bool {
        self.enable_kv_cache_events && self.publisher == Some(PublisherKind::Zmq)
    }

    /// Converts the JSON value into the configuration of the publisher. `format` overrides the format in the
    /// JSON value.
    fn into_config(self, format: Option<KvEventFormatArg>) -> KvEventsConfig {
        KvEventsConfig {
            endpoint: self.endpoint,
            replay_endpoint: self.replay_endpoint,
            buffer_steps: self.buffer_steps,
            hwm: self.hwm,
            max_queue_size: self.max_queue_size,
            max_queue_bytes: self.max_queue_bytes,
            topic: self.topic,
            bind: self.bind.into(),
            format: format.unwrap_or(self.format).into(),
            sequence_start: self.sequence_start.into(),
            idle_heartbeat_interval: (self.idle_beat_s > 0.0)
                .then(|| Duration::from_secs_f64(self.idle_beat_s)),
            token_ids: self.token_ids,
        }
    }

    fn check(&self) -> Result<(), String> {
        let batches = |name: &str, value: usize, min: usize| {
            let in_range = (min..=BATCHES_MAX).contains(&value);
            if in_range { Ok(()) } else { Err(format!("{name} {value}: {min} to {BATCHES_MAX}")) }
        };
        batches("buffer_steps", self.buffer_steps, 0)?;
        batches("max_queue_size", self.max_queue_size, 1)?;
        if self.max_queue_bytes == 0 {
            return Err("max_queue_bytes 0: at least 1".to_owned());
        }
        if self.hwm < 0 {
            return Err(format!("hwm {}: 0 (no limit) or more", self.hwm));
        }
        if !(0.0..=IDLE_HEARTBEAT_MAX_S).contains(&self.idle_beat_s) {
            return Err(format!("idle_beat_s {}: 0 to {IDLE_HEARTBEAT_MAX_S}", self.idle_beat_s));
        }
        Ok(())
    }
}

/// Parses the value of `--kv-events-config`. The error message names the keys that are unknown.
fn config(text: &str) -> Result<KvEventsConfigJson, String> {
    let object = super::units::json_object(text)?; // serde would accept a list.
    let config = serde_json::from_value(object.into());
    let config: KvEventsConfigJson = config.map_err(|error| error.to_string())?;
    config.check()?;
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enabled(keys: &str) -> KvEventsConfig {
        let args =
            KvEventsArgs { kv_events_config: Some(config(keys).unwrap()), kv_events_format: None };
        args.enabled().unwrap()
    }

    #[test]
    fn defaults_are_loopback_and_no_replay() {
        let config = enabled(r#"{"enable_kv_cache_events": true}"#);
        assert_eq!(config.endpoint, "tcp://127.0.0.1:5557");
        assert_eq!(
            (config.replay_endpoint.as_deref(), config.idle_heartbeat_interval),
            (None, None)
        );
        assert_eq!(
            (config.buffer_steps, config.hwm, config.max_queue_size),
            (10_000, 100_000, 100_000)
        );
        assert_eq!((config.format, config.bind), (KvEventFormat::Map, BindMode::Auto));
        assert_eq!(config.max_queue_bytes, 256 << 20);
        assert!(config.token_ids && config.sequence_start == InitialSequenceNumber::Clock);
    }

    #[test]
    fn every_key_is_read() {
        let config = enabled(
            r#"{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "ipc:///tmp/e",
                "replay_endpoint": "tcp://*:5558", "buffer_steps": 0, "hwm": 7, "max_queue_size": 9,
                "topic": "kv@{pod}", "bind": false, "format": "array", "sequence_start": "zero",
                "idle_beat_s": 0.5, "token_ids": false, "max_queue_bytes": 8}"#,
        );
        assert_eq!(config.replay_endpoint.as_deref(), Some("tcp://*:5558"));
        assert_eq!((config.buffer_steps, config.hwm, config.max_queue_size), (0, 7, 9));
        assert_eq!((config.topic.as_str(), config.bind), ("kv@{pod}", BindMode::Connect));
        assert_eq!(
            (config.format, config.sequence_start),
            (KvEventFormat::Array, InitialSequenceNumber::Zero)
        );
        assert_eq!(config.idle_heartbeat_interval, Some(Duration::from_millis(500)));
        assert!(!config.token_ids && config.max_queue_bytes == 8);
    }

    #[test]
    fn events_are_disabled_by_default() {
        for keys in [
            "{}",
            r#"{"enable_kv_cache_events": true, "publisher": null}"#,
            r#"{"enable_kv_cache_events": true, "publisher": "null"}"#,
        ] {
            let kv_events_config = Some(config(keys).unwrap());
            let args = KvEventsArgs { kv_events_config, kv_events_format: None };
            assert_eq!(args.enabled(), None, "{keys}");
        }
    }

    #[test]
    fn invalid_keys_are_named() {
        for (keys, expected) in [
            (r#"{"enable_kv_events": true}"#, "enable_kv_events"),
            (r#"{"publisher": "nats"}"#, "nats"),
            (r#"{"buffer_steps": -1}"#, "-1"),
            (r#"{"buffer_steps": 9000000}"#, "buffer_steps 9000000"),
            (r#"{"max_queue_size": 0}"#, "max_queue_size 0"),
            (r#"{"hwm": -5}"#, "hwm -5"),
            (r#"{"max_queue_bytes": 0}"#, "max_queue_bytes 0"),
            (r#"{"idle_beat_s": -1}"#, "idle_beat_s -1"),
            (r#"{"format": "json"}"#, "json"),
            ("[]", "not a JSON object"),
            ("enabled", "not a JSON object"),
        ] {
            let error = config(keys).unwrap_err();
            assert!(error.contains(expected), "{keys}: {error}");
        }
    }
}
