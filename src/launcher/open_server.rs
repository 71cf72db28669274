//! A server before its model is loaded: its listeners are open, so that probes can read its state.

use super::{listeners, settings, signals};
use crate::config::{ProcessEnvironment, ServeArgs};
use anyhow::{Context, Result};
use engine::HealthMonitor;
use engine::nodes::NodeListener;
use server::listener::ConnectionLimiter;
use server::{AppState, RequestTracer};
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::runtime::Runtime;

/// Server that already listens for connections, but whose model is not loaded yet.
pub(super) struct ListeningServer {
    pub(super) app: Arc<AppState>,
    /// Limiter and list of open connections.
    pub(super) connections: ConnectionLimiter,
    /// Address of the public listener.
    pub(super) address: SocketAddr,
    /// Listener for the other nodes of the cluster.
    pub(super) node_listener: Option<NodeListener>,
}

impl ListeningServer {
    /// Opens the listeners.
    ///
    /// Errors: a port is in use, or a signal handler cannot be installed.
    pub(super) fn open(
        args: &ServeArgs,
        environment: &ProcessEnvironment,
        runtime: &Runtime,
    ) -> Result<Self> {
        let options = settings::options(args, runtime.handle())?;
        let app = Arc::new(AppState::new(options, Arc::new(HealthMonitor::default())));
        {
            let _runtime_guard = runtime.enter();
            let tracer = app.options.tracer.clone();
            signals::handle_harmless_signals(move || tracer.iter().for_each(RequestTracer::reopen))
                .context("cannot install signal handlers")?;
        }
        let connections = ConnectionLimiter::new(settings::connections_max());
        let address = listeners::open_public(args, runtime, &app, &connections)?;
        listeners::open_admin(args, runtime, &app, &connections)?;
        let open = |cluster| NodeListener::open(cluster, args.nodes.secret(environment)?);
        let node_listener = args.nodes.cluster().map(open).transpose()?;
        Ok(Self { app, connections, address, node_listener })
    }
}
