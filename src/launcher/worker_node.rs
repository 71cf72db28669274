//! `hadron serve` on a node other than node 0: it reads the model, joins the cluster and runs the executors
//! of this node.

use super::model_files::ModelFiles;
use super::shutdown::{EXIT_CODE_FATAL, second_signal_exit_code};
use super::{device_detection, executor_program, settings, signals};
use crate::config::{DeviceArg, ProcessEnvironment, ServeArgs};
use anyhow::{Context, Result};
use engine::ExecutorLaunchOptions;
use engine::nodes::{ClusterConfig, WorkerNode, WorkerNodeConfig, WorkerNodeEvent, WorkerNodeExit};
use std::process::ExitCode;
use std::sync::mpsc::channel;
use tokio::runtime::Runtime;

/// Runs this node until node 0 releases it or the connection to node 0 is lost. Returns the exit code of the
/// process.
pub fn run(
    args: &ServeArgs,
    environment: &ProcessEnvironment,
    cluster: &ClusterConfig,
    runtime: &Runtime,
) -> Result<ExitCode> {
    let secret = args.nodes.secret(environment)?;
    {
        let _runtime_guard = runtime.enter();
        signals::handle_harmless_signals(|| {}).context("cannot install signal handlers")?;
    }
    let mut args = args.clone();
    if args.engine.device == DeviceArg::Auto {
        args.engine.device = device_detection::detect();
    }
    let files = ModelFiles::resolve(&args, environment)?;
    args.engine.set_default_max_num_seqs(files.config.gated_delta.is_some());
    settings::check_world(&args, &files)?;
    let config = settings::executor(&args, &files, environment)?;
    let (sender, events) = channel();
    {
        let _runtime_guard = runtime.enter();
        let sender = sender.clone();
        signals::forward(move |number| sender.send(WorkerNodeEvent::Signal(number)).is_ok())
            .context("cannot install signal handlers")?;
    }
    let program = executor_program::program(args.log.log_format);
    let setup = WorkerNodeConfig {
        cluster: cluster.clone(),
        secret,
        config,
        launch_options: ExecutorLaunchOptions { as_processes: true, program },
        startup_timeout: args.engine.startup_timeout.0,
    };
    let Some(mut node) = WorkerNode::join(setup, sender, &events)? else {
        return Ok(ExitCode::SUCCESS); // A shutdown signal arrived.
    };
    Ok(match node.serve(&events, args.http.shutdown_timeout.0) {
        WorkerNodeExit::Left => ExitCode::SUCCESS,
        WorkerNodeExit::SecondSignal(number) => second_signal_exit_code(number),
        WorkerNodeExit::Disconnected => ExitCode::from(EXIT_CODE_FATAL),
    })
}
