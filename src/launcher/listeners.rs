//! The sockets of a server: the one for clients, and the operators' own if they ask for it.

use crate::config::ServeArgs;
use crate::server::app::AppState;
use crate::server::connection::ConnectionDeadlines;
use crate::server::listener::{ConnectionLimiter, bind};
use crate::server::routes::{admin_router, router};
use anyhow::{Context, Result, anyhow};
use axum::Router;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use tokio::runtime::Runtime;

/// Opens the clients' socket and answers on it from now on.
pub fn open_public(
    args: &ServeArgs,
    runtime: &Runtime,
    app: &Arc<AppState>,
    connections: &ConnectionLimiter,
) -> Result<SocketAddr> {
    let (host, port) = (args.http.host.as_str(), args.http.port);
    let mut addresses = (host, port)
        .to_socket_addrs()
        .with_context(|| format!("--host {host}: not an address of this machine"))?;
    let address = addresses.next().ok_or_else(|| anyhow!("--host {host}: no address"))?;
    let address = open(address, (app, router(Arc::clone(app))), runtime, connections)?;
    if !address.ip().is_loopback() && !app.options.api_keys.guard_clients() {
        tracing::warn!(
            %address,
            "anyone who can reach this address can use the model: --api-key asks for a key"
        );
    }
    Ok(address)
}

/// Opens the operators' socket, if there is to be one.
pub fn open_admin(
    args: &ServeArgs,
    runtime: &Runtime,
    app: &Arc<AppState>,
    connections: &ConnectionLimiter,
) -> Result<()> {
    let Some(asked) = &args.access.admin_listen else { return Ok(()) };
    let mut addresses = asked
        .to_socket_addrs()
        .with_context(|| format!("--admin-listen {asked}: not HOST:PORT of this machine"))?;
    let address = addresses.next().ok_or_else(|| anyhow!("--admin-listen {asked}: no address"))?;
    let routes = admin_router(Arc::clone(app));
    let address = open(address, (app, routes), runtime, connections)?;
    let keys = &app.options.api_keys;
    if !address.ip().is_loopback() && !keys.guard_admins() && !keys.guard_clients() {
        tracing::warn!(
            %address,
            "anyone who can reach this address can use the admin routes: --admin-key asks for a key"
        );
    }
    tracing::info!(%address, "admin routes");
    Ok(())
}

fn open(
    address: SocketAddr,
    (app, routes): (&Arc<AppState>, Router),
    runtime: &Runtime,
    connections: &ConnectionLimiter,
) -> Result<SocketAddr> {
    let _inside = runtime.enter();
    let listener = bind(address).with_context(|| format!("cannot listen on {address}"))?;
    let address = listener.local_addr().context("the socket has no address")?;
    let (accepting, face) = (connections.clone(), (Arc::clone(app), routes));
    runtime.spawn(
        async move { accepting.accept(listener, face, ConnectionDeadlines::default()).await },
    );
    Ok(address)
}
