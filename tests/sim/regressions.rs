//! Seeds that once failed, one line each, with what they found.

use crate::seed_sweep::run;
use scheduler::FaultInjection;

/// A seed passes.
fn assert_seed_passes(seed: u64) {
    let run = run(seed, FaultInjection::default(), false);
    assert!(run.broken.is_none(), "seed {seed}: {:?}", run.broken);
}

#[test]
fn regression_seeds_pass() {
    assert_seed_passes(56); // A row that failed left no drafts in its seat for the step in flight behind it.
    assert_seed_passes(265); // A lost replica's queue moved to a pool that could never hold it.
    assert_seed_passes(297); // A queue stayed with its lost replica though another one had come back.
    assert_seed_passes(2_030_157_688); // The world took a group for back whose loss stood behind its return, not what the engine did.
    assert_seed_passes(1_050_925_278); // News of a death came when those who had followed the dead were gone and replaced, too.
    assert_seed_passes(101_126); // A standstill held a batch in the process; its executor was given up a beat after it had left.
    assert_seed_passes(101_202); // The same, of the last of four.
    assert_seed_passes(102_858); // As 101,126, in the worlds of an earlier day, and the next three.
    assert_seed_passes(121_339);
    assert_seed_passes(123_129);
    assert_seed_passes(2_000_104_060);
    assert_seed_passes(121_386); // The world asked that a hang be noticed when all was over.
    assert_seed_passes(131_333); // The same.
    assert_seed_passes(50_600_332); // All were restarted so often that a prompt of 854 steps needed more than six lives.
}
