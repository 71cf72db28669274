//! Where a publisher is: as the command line says, or as the server says.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use crate::client::OpenAiClient;
use crate::config::{ClientArgs, DurationArg, ProcessEnvironment, SubscribeArgs};

/// Time for the server to answer.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Addresses to connect to.
pub(super) struct PublisherEndpoints {
    pub(super) publish: String,
    pub(super) replay: Option<String>,
}

/// Resolves what the arguments leave open.
pub(super) fn resolve(
    args: &SubscribeArgs,
    environment: &ProcessEnvironment,
) -> Result<PublisherEndpoints> {
    if let Some(publish) = &args.endpoint {
        return Ok(PublisherEndpoints { publish: publish.clone(), replay: args.replay.clone() });
    }
    let client_args = ClientArgs {
        base_url: args.url.clone(),
        model: None,
        api_key: args.api_key.clone(),
        timeout: DurationArg(TIMEOUT),
    };
    let client = OpenAiClient::new(&args.url, &client_args, environment)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let sources = runtime
        .block_on(client.get("/kv_event_sources"))
        .with_context(|| format!("{}: name an ENDPOINT, or a server with --url", args.url))?;
    let Some(source) = sources.get(args.dp_rank.to_string()) else {
        bail!("{}: replica {} publishes no KV events (--kv-events-config)", args.url, args.dp_rank);
    };
    let address = |name: &str| source[name].as_str().map(reachable);
    // vLLM does not say who connects to whom; its publishers listen.
    let listens = source["bind"] != false;
    let Some(publish) = address("endpoint").filter(|_| listens) else {
        bail!("{}: its publisher connects to {}; listen there", args.url, source["endpoint"]);
    };
    Ok(PublisherEndpoints {
        publish,
        replay: args.replay.clone().or_else(|| address("replay_endpoint")),
    })
}

/// A wildcard is no address to connect to.
fn reachable(endpoint: &str) -> String {
    endpoint.replace("tcp://0.0.0.0:", "tcp://127.0.0.1:").replace("tcp://[::]:", "tcp://[::1]:")
}
