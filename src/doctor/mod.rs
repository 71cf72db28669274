//! `hadron doctor`: describes a machine on one page: GPUs, drivers, libraries, links, kernel cache, limits of
//! the host, and problems that prevent serving or make it slow. It changes nothing.

mod findings;
mod gpus;
mod host;
mod page;
mod report;

use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;

use crate::config::{DeviceArg, DoctorArgs, ProcessEnvironment};
use crate::launcher::device_detection;
use report::DoctorReport;

/// Prints the report. The exit code is 0 if the machine can serve, else 1.
pub fn run(args: &DoctorArgs, environment: &ProcessEnvironment) -> Result<ExitCode> {
    let report = report(args, environment);
    let text =
        if args.json { serde_json::to_string_pretty(&report)? + "\n" } else { page::page(&report) };
    std::io::stdout().write_all(text.as_bytes())?;
    Ok(if report.can_serve { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn report(args: &DoctorArgs, environment: &ProcessEnvironment) -> DoctorReport {
    let vendors = gpus::vendors(args, environment);
    let selected = match args.device {
        DeviceArg::Auto => device_detection::detect(),
        device => device,
    };
    let mut report = DoctorReport {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        build: if cfg!(debug_assertions) { "development" } else { "release" }.to_owned(),
        device: name(selected).to_owned(),
        can_serve: true,
        host: host::host(Path::new("/")),
        kernel_cache: environment.kernel_cache.as_deref().map(host::kernel_cache),
        gpus: vendors,
        findings: Vec::new(),
    };
    let is_required = args.device != DeviceArg::Auto;
    report.findings = findings::findings(&report, is_required);
    report.can_serve = !findings::has_error(&report.findings);
    if !is_required && findings::falls_back(&report) {
        name(DeviceArg::Cpu).clone_into(&mut report.device);
    }
    report
}

/// Name of a device, as in `--device`.
fn name(device: DeviceArg) -> &'static str {
    match device {
        DeviceArg::Auto => "auto",
        DeviceArg::Cpu => "cpu",
        DeviceArg::Rocm => "rocm",
        DeviceArg::Cuda => "cuda",
    }
}
