//! Socket endpoints of each DP rank, and the topic of the rank's events.

use super::config::BindMode;

/// Reason why an endpoint or a topic is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EndpointError {
    /// The endpoint is not `tcp://HOST:PORT` or `ipc://PATH`.
    #[error("{key} {endpoint}: not tcp://HOST:PORT or ipc://PATH")]
    Shape {
        /// Name of the setting that has the invalid endpoint.
        key: &'static str,
        /// Value of the setting.
        endpoint: String,
    },
    /// The port of the rank exceeds 65535.
    #[error("{endpoint}: port {port} + rank {rank} is more than 65535")]
    Port {
        /// Endpoint of rank 0.
        endpoint: String,
        /// Port of rank 0.
        port: u16,
        /// DP rank.
        rank: u16,
    },
    /// The topic has an unknown placeholder or an unbalanced brace.
    #[error("topic {template}: the placeholders are {{pod}}, {{model}}, {{dp_rank}} and {{epoch}}")]
    Topic {
        /// Topic template.
        template: String,
    },
}

/// Returns the endpoint of a DP rank: the rank is added to TCP ports, and ipc paths get a suffix. Port 0
/// stays 0, so that the operating system chooses a port.
pub(super) fn endpoint_of_rank(
    key: &'static str,
    endpoint: &str,
    rank: u16,
) -> Result<String, EndpointError> {
    let wrong = || EndpointError::Shape { key, endpoint: endpoint.to_owned() };
    let (scheme, rest) = endpoint.split_once("://").ok_or_else(wrong)?;
    match scheme {
        "tcp" => {
            let (host, port) =
                rest.rsplit_once(':').filter(|(h, _)| !h.is_empty()).ok_or_else(wrong)?;
            let port = if port == "*" { 0 } else { port.parse::<u16>().map_err(|_| wrong())? };
            if port == 0 {
                return Ok(format!("tcp://{host}:0"));
            }
            let endpoint = endpoint.to_owned();
            let rank_port =
                port.checked_add(rank).ok_or(EndpointError::Port { endpoint, port, rank })?;
            Ok(format!("tcp://{host}:{rank_port}"))
        }
        "ipc" if rest.is_empty() || rest == "*" => Err(wrong()),
        "ipc" if rank == 0 => Ok(endpoint.to_owned()),
        "ipc" => Ok(format!("{endpoint}_dp{rank}")),
        _ => Err(wrong()),
    }
}

/// Returns the host of a TCP endpoint.
fn host(endpoint: &str) -> Option<&str> {
    let (host, _) = endpoint.strip_prefix("tcp://")?.rsplit_once(':')?;
    Some(host.trim_start_matches('[').trim_end_matches(']'))
}

/// Whether a PUB socket binds to the endpoint; otherwise it connects to it.
pub(super) fn binds(mode: BindMode, endpoint: &str) -> bool {
    match mode {
        BindMode::Bind => true,
        BindMode::Connect => false,
        BindMode::Auto => {
            is_public(endpoint)
                || host(endpoint).is_none_or(|host| {
                    host == "localhost" || host == "::1" || host.starts_with("127.")
                })
        }
    }
}

/// Whether the endpoint is a wildcard address (all network interfaces).
pub(super) fn is_public(endpoint: &str) -> bool {
    host(endpoint).is_some_and(|host| matches!(host, "*" | "0.0.0.0" | "::"))
}

/// Values that replace the placeholders of the topic template.
#[derive(Debug, Clone, Default)]
pub struct TopicFields {
    /// Name of the pod or machine.
    pub pod: String,
    /// First served model name.
    pub model: String,
    /// DP rank.
    pub rank: u16,
    /// Epoch of the publisher: the sequence number of its first batch.
    pub epoch: u64,
}

/// Returns the topic: the template with its placeholders replaced.
pub(super) fn topic(template: &str, fields: &TopicFields) -> Result<String, EndpointError> {
    let wrong = || EndpointError::Topic { template: template.to_owned() };
    let mut topic = String::new();
    let mut rest = template;
    while let Some((before, after)) = rest.split_once('{') {
        let (name, after) = after.split_once('}').ok_or_else(wrong)?;
        topic += before;
        match name {
            "pod" => topic += &fields.pod,
            "model" => topic += &fields.model,
            "dp_rank" => topic += &fields.rank.to_string(),
            "epoch" => topic += &fields.epoch.to_string(),
            _ => return Err(wrong()),
        }
        rest = after;
    }
    Ok(topic + rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_has_its_own_endpoint() {
        let of = |endpoint: &str, rank| endpoint_of_rank("endpoint", endpoint, rank).ok();
        assert_eq!(of("tcp://*:5557", 3).as_deref(), Some("tcp://*:5560"));
        assert_eq!(of("tcp://127.0.0.1:0", 3).as_deref(), Some("tcp://127.0.0.1:0"));
        assert_eq!(of("tcp://[::1]:5557", 1).as_deref(), Some("tcp://[::1]:5558"));
        assert_eq!(of("ipc:///cache", 0).as_deref(), Some("ipc:///cache"));
        assert_eq!(of("ipc:///cache", 2).as_deref(), Some("ipc:///cache_dp2"));
        for wrong in [
            "",
            "tcp://",
            "tcp://:1",
            "tcp://h",
            "tcp://h:70000",
            "udp://h:1",
            "ipc://",
            "ipc://*",
            "inproc://cache",
        ] {
            assert_eq!(of(wrong, 0), None, "{wrong}");
        }
        assert_eq!(of("tcp://h:65535", 1), None);
    }

    #[test]
    fn auto_bind_only_for_local_endpoints() {
        for endpoint in [
            "tcp://*:1",
            "tcp://0.0.0.0:1",
            "tcp://[::]:1",
            "tcp://127.0.0.1:1",
            "tcp://[::1]:1",
            "tcp://localhost:1",
            "ipc:///tmp/x",
        ] {
            assert!(binds(BindMode::Auto, endpoint), "{endpoint}");
        }
        for endpoint in ["tcp://10.0.0.1:1", "tcp://collector:5557", "tcp://[fe80::1]:1"] {
            assert!(!binds(BindMode::Auto, endpoint), "{endpoint}");
            assert!(binds(BindMode::Bind, endpoint));
        }
        assert!(!binds(BindMode::Connect, "tcp://*:1"));
        assert!(is_public("tcp://[::]:1") && !is_public("tcp://127.0.0.1:1"));
    }

    #[test]
    fn a_topic_is_a_template() {
        let fields =
            TopicFields { pod: "p-0".to_owned(), model: "org/m".to_owned(), rank: 1, epoch: 7 };
        let of = |template: &str| topic(template, &fields).ok();
        assert_eq!(of("").as_deref(), Some(""));
        assert_eq!(of("kv@{pod}@{model}").as_deref(), Some("kv@p-0@org/m"));
        assert_eq!(of("{epoch}/{dp_rank}}").as_deref(), Some("7/1}"));
        assert_eq!((of("{host}"), of("x{pod")), (None, None));
    }
}
