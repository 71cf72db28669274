//! The sockets of a server: the one for clients, and the operators' own if they ask for it.

use crate::config::ServeArgs;
use crate::server::app::App;
use crate::server::connection::Deadlines;
use crate::server::listen::{Connections, bind};
use crate::server::routes::{admin_router, router};
use anyhow::{Context, Result, anyhow};
use axum::Router;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use tokio::runtime::Runtime;

/// Opens the clients' socket and answers on it from now on.
pub fn public(
    args: &ServeArgs,
    runtime: &Runtime,
    app: &Arc<App>,
    connections: &Connections,
) -> Result<SocketAddr> {
    let (host, port) = (args.http.host.as_str(), args.http.port);
    let mut addresses = (host, port)
        .to_socket_addrs()
        .with_context(|| format!("--host {host}: not an address of this machine"))?;
    let address = addresses.next().ok_or_else(|| anyhow!("--host {host}: no address"))?;
    let address = open(address, (app, router(Arc::clone(app))), runtime, connections)?;
    if !address.ip().is_loopback() && !app.options.keys.guard_clients() {
        tracing::warn!(
            %address,
            "anyone who can reach this address can use the model: --api-key asks for a key"
        );
    }
    Ok(address)
}

/// Opens the operators' socket, if there is to be one.
pub fn admin(
    args: &ServeArgs,
    runtime: &Runtime,
    app: &Arc<App>,
    connections: &Connections,
) -> Result<()> {
    let Some(asked) = &args.access.admin_listen else { return Ok(()) };
    let mut addresses = asked
        .to_socket_addrs()
        .with_context(|| format!("--admin-listen {asked}: not HOST:PORT of this machine"))?;
    let address = addresses.next().ok_or_else(|| anyhow!("--admin-listen {asked}: no address"))?;
    let routes = admin_router(Arc::clone(app));
    let address = open(address, (app, routes), runtime, connections)?;
    let keys = &app.options.keys;
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
    (app, routes): (&Arc<App>, Router),
    runtime: &Runtime,
    connections: &Connections,
) -> Result<SocketAddr> {
    let _inside = runtime.enter();
    let listener = bind(address).with_context(|| format!("cannot listen on {address}"))?;
    let address = listener.local_addr().context("the socket has no address")?;
    let (accepting, face) = (connections.clone(), (Arc::clone(app), routes));
    runtime.spawn(async move { accepting.accept(listener, face, Deadlines::default()).await });
    Ok(address)
}
