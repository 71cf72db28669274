//! Determines the endpoints of a KV-event publisher, from the command line or by a request to the server.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use crate::client::OpenAiClient;
use crate::config::{DurationArg, EvalClientArgs, EventsSubscribeArgs, ProcessEnvironment};

/// Timeout of the request to the server for its publisher endpoints.
const TIMEOUT: Duration = Duration::from_secs(10);

/// ZMQ endpoints of a KV-event publisher.
pub(super) struct PublisherEndpoints {
    pub(super) publish: String,
    pub(super) replay: Option<String>,
}

/// Returns the endpoints from the arguments; if they contain no endpoint, requests them from the server.
pub(super) fn resolve(
    args: &EventsSubscribeArgs,
    environment: &ProcessEnvironment,
) -> Result<PublisherEndpoints> {
    if let Some(publish) = &args.endpoint {
        return Ok(PublisherEndpoints { publish: publish.clone(), replay: args.replay.clone() });
    }
    let sources = request_sources(args, environment)?;
    let Some(source) = sources.get(args.dp_rank.to_string()) else {
        bail!("{}: replica {} publishes no KV events (--kv-events-config)", args.url, args.dp_rank);
    };
    let address = |name: &str| source[name].as_str().map(reachable);
    // vLLM does not report `bind`; its publishers bind.
    let binds = source["bind"] != false;
    let Some(publish) = address("endpoint").filter(|_| binds) else {
        bail!("{}: the publisher connects to {}; subscribe there", args.url, source["endpoint"]);
    };
    Ok(PublisherEndpoints {
        publish,
        replay: args.replay.clone().or_else(|| address("replay_endpoint")),
    })
}

/// Requests the list of KV-event publishers, one per replica, from the server (`/kv_event_sources`).
fn request_sources(
    args: &EventsSubscribeArgs,
    environment: &ProcessEnvironment,
) -> Result<serde_json::Value> {
    let client_args = EvalClientArgs {
        base_url: args.url.clone(),
        model: None,
        api_key: args.api_key.clone(),
        timeout: DurationArg(TIMEOUT),
    };
    let client = OpenAiClient::new(&args.url, &client_args, environment)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime
        .block_on(client.get("/kv_event_sources"))
        .with_context(|| format!("{}: give an ENDPOINT, or a server with --url", args.url))
}

/// Replaces the wildcard address in an endpoint with the loopback address.
fn reachable(endpoint: &str) -> String {
    endpoint.replace("tcp://0.0.0.0:", "tcp://127.0.0.1:").replace("tcp://[::]:", "tcp://[::1]:")
}
