//! HTTP client for OpenAI-compatible servers, used by `bench`, `eval` and `events`: HTTP/1.1 over plain TCP
//! with keep-alive connections, JSON replies and server-sent events.

mod connection_pool;
mod sse;
#[cfg(test)]
mod tests;

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;

pub use connection_pool::{IdleConnections, run_limited};
pub use sse::{SseEvent, SseEventStream};

use crate::config::{EvalClientArgs, ProcessEnvironment};

/// Maximum bytes of a JSON reply.
const REPLY_BYTES_MAX: usize = 256 << 20;

/// Reason why a request failed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ClientError {
    /// The URL is invalid or not supported.
    #[error("{0}: {1}")]
    Url(String, &'static str),
    /// The connection to the server could not be opened, or failed.
    #[error("{0}")]
    Connection(String),
    /// The server returned an error status.
    #[error("status {status}: {message}")]
    Status {
        /// HTTP status of the response.
        status: u16,
        /// Error message of the reply, or the start of its body.
        message: String,
    },
    /// No data arrived from the server for this time.
    #[error("no progress for {0:?}")]
    Timeout(Duration),
    /// The reply does not conform to the OpenAI API.
    #[error("unexpected reply: {0}")]
    Reply(String),
}

/// HTTP client for one server, with a pool of idle connections.
#[derive(Debug)]
pub struct OpenAiClient {
    /// Host and port of the server, `host:port`.
    authority: String,
    /// Path of the base URL before `/v1`; usually empty.
    prefix: String,
    authorization: Option<String>,
    timeout: Duration,
    idle: IdleConnections<SendRequest<Full<Bytes>>>,
}

impl OpenAiClient {
    /// Creates a client for the server at `base_url`, with the API key and the timeout of `args`.
    pub fn new(
        base_url: &str,
        args: &EvalClientArgs,
        environment: &ProcessEnvironment,
    ) -> Result<Self, ClientError> {
        let invalid = |reason| ClientError::Url(base_url.to_owned(), reason);
        let rest = base_url.strip_prefix("http://").ok_or_else(|| {
            invalid("only http:// is supported; use a TLS proxy on loopback for https")
        })?;
        let rest = rest.trim_end_matches('/');
        let (authority, prefix) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
        if authority.is_empty() {
            return Err(invalid("no host"));
        }
        let port = authority.rsplit_once(':').is_some_and(|(_, p)| p.parse::<u16>().is_ok());
        let authority = if port { authority.to_owned() } else { format!("{authority}:80") };
        let key = args.api_key.clone().or_else(|| environment.api_key.clone());
        Ok(Self {
            authority,
            prefix: prefix.trim_end_matches("/v1").to_owned(),
            authorization: key.map(|key| format!("Bearer {key}")),
            timeout: args.timeout.0,
            idle: IdleConnections::default(),
        })
    }

    /// Returns the model name to request: `name`, or the first model that the server lists.
    pub async fn model(&self, name: Option<&str>) -> Result<String, ClientError> {
        if let Some(name) = name {
            return Ok(name.to_owned());
        }
        let card = self.first_model_card().await?;
        let id = card["id"].as_str().map(str::to_owned);
        id.ok_or_else(|| ClientError::Reply("/v1/models lists no model".to_owned()))
    }

    /// Returns the first entry of `/v1/models`.
    pub async fn first_model_card(&self) -> Result<Value, ClientError> {
        let request = self.request(Method::GET, "/v1/models", Bytes::new())?;
        let mut models = self.reply(request).await?;
        Ok(models["data"][0].take())
    }

    /// Sends a GET request and returns the JSON reply.
    pub async fn get(&self, path: &str) -> Result<Value, ClientError> {
        self.reply(self.request(Method::GET, path, Bytes::new())?).await
    }

    /// Sends a POST request with a JSON body and returns the JSON reply.
    pub async fn post(&self, path: &str, body: &Value) -> Result<Value, ClientError> {
        self.reply(self.request(Method::POST, path, body.to_string().into())?).await
    }

    /// Sends a POST request with a JSON body and returns the stream of server-sent events.
    pub async fn post_stream(
        &self,
        path: &str,
        body: Bytes,
    ) -> Result<SseEventStream<'_>, ClientError> {
        let request = self.request(Method::POST, path, body)?;
        let (response, connection) = self.send(request).await?;
        if !response.status().is_success() {
            return Err(self.error_response(response, connection).await);
        }
        Ok(SseEventStream::new(response.into_body(), connection, &self.idle, self.timeout))
    }

    fn request(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<Request<Full<Bytes>>, ClientError> {
        let uri = format!("{}{path}", self.prefix);
        let mut request = Request::builder()
            .method(method)
            .uri(uri)
            .header(HOST, &self.authority)
            .header(CONTENT_TYPE, "application/json");
        if let Some(authorization) = &self.authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        request.body(Full::new(body)).map_err(|e| ClientError::Connection(e.to_string()))
    }

    async fn reply(&self, request: Request<Full<Bytes>>) -> Result<Value, ClientError> {
        let (response, connection) = self.send(request).await?;
        if !response.status().is_success() {
            return Err(self.error_response(response, connection).await);
        }
        let bytes = self.body(response.into_body()).await?;
        self.idle.put(connection);
        serde_json::from_slice(&bytes).map_err(|e| ClientError::Reply(e.to_string()))
    }

    async fn error_response(
        &self,
        response: Response<Incoming>,
        connection: SendRequest<Full<Bytes>>,
    ) -> ClientError {
        let status = response.status().as_u16();
        let bytes = match self.body(response.into_body()).await {
            Ok(bytes) => bytes,
            Err(error) => return error,
        };
        self.idle.put(connection);
        let json: Option<Value> = serde_json::from_slice(&bytes).ok();
        let error = json.as_ref().map(|json| &json["error"]);
        let text = |name: &str| error.and_then(|error| error[name].as_str());
        let message = match (text("message"), text("param")) {
            (Some(message), Some(param)) => format!("{message} (param: {param})"),
            (Some(message), None) => message.to_owned(),
            (None, _) => String::from_utf8_lossy(&bytes).chars().take(200).collect(),
        };
        ClientError::Status { status, message }
    }

    async fn body(&self, body: Incoming) -> Result<Bytes, ClientError> {
        let collected = Limited::new(body, REPLY_BYTES_MAX).collect();
        match tokio::time::timeout(self.timeout, collected).await {
            Ok(Ok(collected)) => Ok(collected.to_bytes()),
            Ok(Err(error)) => Err(ClientError::Connection(error.to_string())),
            Err(_) => Err(ClientError::Timeout(self.timeout)),
        }
    }

    /// Sends a request on an idle connection, or on a new one if none is idle or the server has closed the
    /// idle one.
    async fn send(
        &self,
        request: Request<Full<Bytes>>,
    ) -> Result<(Response<Incoming>, SendRequest<Full<Bytes>>), ClientError> {
        while let Some(mut connection) = self.idle.take() {
            if connection.ready().await.is_ok() {
                match self.exchange(&mut connection, request.clone()).await {
                    // The server closed the idle connection before it sent a response. The request is sent
                    // again on a new connection.
                    Err(ClientError::Connection(_)) => break,
                    response => return Ok((response?, connection)),
                }
            }
        }
        let mut connection = self.connect().await?;
        let response = self.exchange(&mut connection, request).await?;
        Ok((response, connection))
    }

    async fn exchange(
        &self,
        connection: &mut SendRequest<Full<Bytes>>,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<Incoming>, ClientError> {
        match tokio::time::timeout(self.timeout, connection.send_request(request)).await {
            Ok(response) => response.map_err(|e| ClientError::Connection(e.to_string())),
            Err(_) => Err(ClientError::Timeout(self.timeout)),
        }
    }

    async fn connect(&self) -> Result<SendRequest<Full<Bytes>>, ClientError> {
        let failed =
            |e: &dyn std::fmt::Display| ClientError::Connection(format!("{}: {e}", self.authority));
        let stream = TcpStream::connect(&self.authority).await.map_err(|e| failed(&e))?;
        stream.set_nodelay(true).map_err(|e| failed(&e))?;
        let handshake = http1::handshake(TokioIo::new(stream)).await;
        let (sender, connection) = handshake.map_err(|e| failed(&e))?;
        // The task drives the HTTP connection and ends with it. Its error is dropped, because requests on
        // `sender` fail with the same error.
        tokio::spawn(async move {
            let _reported = connection.await;
        });
        Ok(sender)
    }
}
