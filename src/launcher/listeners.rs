//! TCP listeners of a server: one for clients, and optionally one for the admin routes.

use crate::config::ServeArgs;
use anyhow::{Context, Result, anyhow};
use server::listener::{ConnectionLimiter, bind};
use server::routes::{admin_router, router};
use server::{AppState, ConnectionTimeouts};
use std::future::Future;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

/// Opens the listener for clients and starts to accept connections. Returns its address.
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
    let (limiter, app_state) = (connections.clone(), Arc::clone(app));
    let routes = router(Arc::clone(app));
    let address = open(address, runtime, |listener| async move {
        limiter.accept(listener, app_state, routes, ConnectionTimeouts::default()).await;
    })?;
    if !address.ip().is_loopback() && !app.options.api_keys.requires_client_key() {
        tracing::warn!(
            %address,
            "anyone who can reach this address can use the model: set --api-key to require a key"
        );
    }
    Ok(address)
}

/// Opens the separate listener for the admin routes, if it is configured.
pub fn open_admin(
    args: &ServeArgs,
    runtime: &Runtime,
    app: &Arc<AppState>,
    connections: &ConnectionLimiter,
) -> Result<()> {
    let Some(admin_listen) = &args.access.admin_listen else { return Ok(()) };
    let mut addresses = admin_listen
        .to_socket_addrs()
        .with_context(|| format!("--admin-listen {admin_listen}: not HOST:PORT of this machine"))?;
    let address =
        addresses.next().ok_or_else(|| anyhow!("--admin-listen {admin_listen}: no address"))?;
    let (limiter, app_state) = (connections.clone(), Arc::clone(app));
    let routes = admin_router(Arc::clone(app));
    let address = open(address, runtime, |listener| async move {
        limiter.accept(listener, app_state, routes, ConnectionTimeouts::default()).await;
    })?;
    let keys = &app.options.api_keys;
    if !address.ip().is_loopback() && !keys.has_admin_keys() && !keys.requires_client_key() {
        tracing::warn!(
            %address,
            "anyone who can reach this address can use the admin routes: set --admin-key to require a key"
        );
    }
    tracing::info!(%address, "admin routes");
    Ok(())
}

/// Opens a listener and starts the task `accept` on it. Returns its address.
fn open<F: Future<Output = ()> + Send + 'static>(
    address: SocketAddr,
    runtime: &Runtime,
    accept: impl FnOnce(TcpListener) -> F,
) -> Result<SocketAddr> {
    let _runtime_guard = runtime.enter();
    let listener = bind(address).with_context(|| format!("cannot listen on {address}"))?;
    let address = listener.local_addr().context("the socket has no address")?;
    runtime.spawn(accept(listener));
    Ok(address)
}
