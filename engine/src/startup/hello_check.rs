//! Checks the hello message of an executor.

use super::{ExecutorLabel, ExpectedHello, StartError, WeightsDigestMismatch};
use protocol::{ExecutorHello, PROTOCOL_VERSION, Rank};

/// Checks that the hello message comes from the expected executor.
pub(super) fn check_hello(
    hello: &ExecutorHello,
    rank: Rank,
    label: ExecutorLabel,
    expected: ExpectedHello,
) -> Result<(), StartError> {
    let same = |what, theirs: String, ours: String| {
        if theirs == ours {
            Ok(())
        } else {
            Err(StartError::Mismatch { executor: label, what, theirs, ours })
        }
    };
    same("protocol", hello.version.to_string(), PROTOCOL_VERSION.to_string())?;
    same("build", hello.build.clone(), env!("CARGO_PKG_VERSION").to_owned())?;
    same("epoch", hello.epoch.0.to_string(), expected.epoch.0.to_string())?;
    same("rank", hello.rank.0.to_string(), rank.0.to_string())?;
    if hello.model_digest != expected.manifest {
        let change =
            WeightsDigestMismatch::Folder { theirs: hello.model_digest, ours: expected.manifest };
        return Err(StartError::WeightsChanged { executor: label, change });
    }
    tracing::info!(rank = hello.rank.0, device = hello.device, "executor");
    Ok(())
}
