//! Tensor parallelism: ranks that meet through an all-gather of their host compute the tokens of one rank.

use std::ffi::c_void;
use std::sync::Mutex;
use std::thread;

use hadron_plugin::ForeignRanks;
use serde_json::{Value, json};

use crate::deadlines::DeadlineBarrier;
use crate::emulated_gpu;
use crate::test_host::TestHost;
use crate::test_model::{PluginFixture, TestModel};

/// All-gather between threads, as a host provides it to one of its ranks.
struct RankChannel<'a> {
    messages: &'a Mutex<Vec<Vec<u8>>>,
    barrier: &'a DeadlineBarrier,
    rank: usize,
}

unsafe extern "C" fn all_gather(
    context: *mut c_void,
    own: *const c_void,
    bytes: u64,
    all: *mut c_void,
) -> i32 {
    // SAFETY: the context is a channel that outlives the call, and the buffers have the sizes of the interface.
    unsafe {
        let channel = &*context.cast::<RankChannel<'_>>();
        let own = std::slice::from_raw_parts(own.cast::<u8>(), bytes as usize);
        channel.messages.lock().unwrap()[channel.rank] = own.to_vec();
        channel.barrier.wait();
        let gathered = channel.messages.lock().unwrap().concat();
        all.cast::<u8>().copy_from_nonoverlapping(gathered.as_ptr(), gathered.len());
        channel.barrier.wait();
    }
    0
}

/// Decodes 12 tokens on `size` ranks, and returns those of each rank.
fn decode(
    size: usize,
    fixture: &PluginFixture,
    options: impl Fn(usize) -> Value + Sync,
) -> Vec<Vec<i32>> {
    let messages = Mutex::new(vec![vec![]; size]);
    let barrier = DeadlineBarrier::new(size);
    let run = |rank: usize| {
        let mut channel = RankChannel { messages: &messages, barrier: &barrier, rank };
        let context = std::ptr::from_mut(&mut channel).cast();
        let ranks = ForeignRanks {
            context,
            all_gather: Some(all_gather),
            rank: rank as u32,
            size: size as u32,
        };
        let model = TestModel::open(&options(rank), Some(&ranks)).unwrap();
        model.rehearse().unwrap();
        let mut host = TestHost::new(&model);
        let sequence = host.add(&fixture.tokens[..19]);
        let mut start = 0;
        for _ in 0..12 {
            let len = host.tokens[sequence].len();
            let logits = host.run_one(&model, sequence, start, len - start);
            let token = *host.greedy(&logits).last().unwrap();
            host.tokens[sequence].push(token);
            start = len;
        }
        barrier.wait(); // A rank that closes its model earlier is a failed rank for the others.
        host.tokens[sequence].clone()
    };
    let run = &run;
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..size).map(|rank| scope.spawn(move || run(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn two_ranks_compute_the_tokens_of_one() {
    for name in ["qwen3-tied", "qwen3_moe-plain-tied", "deepseek_v3-groups-yarn"] {
        let fixture = PluginFixture::read(name);
        let dir = tempfile::tempdir().unwrap();
        let options = fixture.options(dir.path());
        let alone = decode(1, &fixture, |_| options.clone());
        let both = decode(2, &fixture, |_| options.clone());
        assert_eq!(both, [alone[0].clone(), alone[0].clone()], "{name}");
    }
}

#[test]
fn two_emulated_gpus_compute_the_tokens_of_one_cpu() {
    let fixture = PluginFixture::read("qwen3-tied");
    let dir = tempfile::tempdir().unwrap();
    let options = fixture.options(dir.path());
    let alone = decode(1, &fixture, |_| options.clone());
    let library = emulated_gpu::library_of("plugin-ranks");
    let both = decode(2, &fixture, |rank| {
        let mut options = options.clone();
        options["device"] = json!("rocm");
        options["device_index"] = json!(rank);
        options["max_num_tokens"] = json!(24);
        options["libraries"] =
            json!({"driver": library, "collectives": library, "emulated_warp_size": 64});
        options["kernel_cache"] = json!(emulated_gpu::kernel_cache());
        options
    });
    assert_eq!(both, [alone[0].clone(), alone[0].clone()]);
}
