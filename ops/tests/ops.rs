//! Tests of ops through their public API: packing, tied embeddings, the step arena, attention over a KV pool.

#![allow(clippy::unwrap_used, reason = "a test fails where an unwrap does")]

use device::CpuConfig;
use kernels::cpu::CpuBackend;
use ops::{
    AttentionKeyRange, AttentionLayerParams, DType, DeviceBatchMetadata, DeviceSequenceSlots,
    DraftVerification, EmbeddingTable, GateActivation, HostBatchMetadata, HostGroupTables, HostMat,
    KvCacheScaling, KvLayout, KvPool, KvTileOrder, OpError, Ops, QkNormRopeParams,
    SAMPLE_NON_FINITE, SAMPLE_OK, SequenceSamplingParams, SequenceSlotLimits, StagedLogitsRow,
    StagedSequenceInit, StagingBuffer, StepBufferLimits, StepBuffers, StepShape,
};

fn ops(dtype: DType) -> Ops {
    let config = CpuConfig { threads: 2, ..CpuConfig::default() };
    Ops::new(CpuBackend::new(config).unwrap().into(), dtype).unwrap()
}

/// Returns `rows × cols` small numbers that every float type represents exactly.
fn numbers(rows: usize, cols: usize, seed: usize) -> Vec<f32> {
    (0..rows * cols).map(|i| ((i * 37 + seed * 11) % 29) as f32 / 8.0 - 1.75).collect()
}

fn bytes(x: &[f32]) -> Vec<u8> {
    x.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn host(bytes: &[u8], rows: usize, cols: usize) -> HostMat<'_> {
    HostMat::new(bytes, DType::F32, rows, cols).unwrap()
}

#[test]
fn stacked_parts_and_slices_are_one_matrix() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let ops = ops(dtype);
        let (q, k) = (numbers(40, 12, 1), numbers(8, 12, 2));
        let (q_bytes, k_bytes) = (bytes(&q), bytes(&k));
        // Shard of one rank: rows [8, 40) of the first matrix and inputs [4, 12) of both matrices.
        let parts = [
            host(&q_bytes, 40, 12).row_range(8, 32).column_range(4, 8),
            host(&k_bytes, 8, 12).column_range(4, 8),
        ];
        let bias = numbers(1, 40, 3);
        let linear = ops.pack_linear(&parts, Some(&bias)).unwrap();
        assert_eq!((linear.outputs(), linear.inputs(), linear.dtype()), (40, 8, dtype));
        let x = numbers(3, 8, 4);
        let input = ops.floats(&x, dtype, &[3, 8]).unwrap();
        let y = ops.read_f32(&ops.linear_f32(&input, &linear).unwrap()).unwrap();
        for t in 0..3 {
            for n in 0..40 {
                let row = if n < 32 { &q[(n + 8) * 12 + 4..] } else { &k[(n - 32) * 12 + 4..] };
                let dot: f32 = x[t * 8..(t + 1) * 8].iter().zip(row).map(|(x, w)| x * w).sum();
                assert!((y[t * 40 + n] - dot - bias[n]).abs() < 1e-4);
            }
        }
    }
}

#[test]
fn tied_head_serves_as_embedding() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let ops = ops(dtype);
        let table = numbers(50, 16, 5);
        let table_bytes = bytes(&table);
        let head = ops.pack_linear(&[host(&table_bytes, 50, 16)], None).unwrap();
        let tied = head.tied_embedding(10);
        let rows = ops.upload(&[host(&table_bytes, 50, 16)], dtype).unwrap();
        let plain = EmbeddingTable::from_rows(rows, 10);
        let ids = ops.ids(&[10, 59, 60, 9, -1, 30]).unwrap();
        let read = |e: &EmbeddingTable| ops.read_f32(&ops.embed(e, &ids).unwrap()).unwrap();
        assert_eq!(read(&tied), read(&plain));
        assert_eq!(read(&tied)[5 * 16..], table[20 * 16..21 * 16]);
        assert!(read(&tied)[2 * 16..5 * 16].iter().all(|x| *x == 0.0));
    }
}

#[test]
fn results_reuse_memory_in_the_same_order() {
    let ops = ops(DType::F32);
    let step = || {
        let a = ops.scratch(DType::F32, &[7, 33]).unwrap();
        let b = ops.scratch(DType::F32, &[7, 33]).unwrap();
        let address = |t: &ops::Tensor| t.mat().unwrap().row::<f32>(0).as_ptr() as usize;
        (address(&a), address(&b))
    };
    let first = step();
    let (a, b) = step();
    assert!([first.0, first.1].contains(&a) && [first.0, first.1].contains(&b));
    let (again, later) = (step(), step());
    assert_eq!(again, later, "equal steps get equal addresses");
}

/// Computes attention of one request, with its KV in blocks 2, 0 and 1, in chunks of 1, 7 and 16 tokens and
/// all at once: the results must be equal.
#[test]
fn paged_attention_is_independent_of_chunking() {
    let (heads, kv_heads, dim, len) = (4, 2, 16, 40usize);
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let ops = ops(dtype);
        let layout = KvLayout {
            layers: 1,
            blocks: 4,
            block_tokens: 16,
            kv_heads,
            head_dim: dim,
            dtype,
            order: KvTileOrder::LaneInterleaved,
        };
        let (cos, sin) = (vec![0.6; 64 * dim / 2], vec![0.8; 64 * dim / 2]);
        let rope = ops.rope_table(&cos, &sin, dim / 2).unwrap();
        let weights = QkNormRopeParams {
            q_norm: None,
            k_norm: None,
            eps: 1e-6,
            rope: &rope,
            kv_scales: KvCacheScaling::UNIT,
        };
        let shape = AttentionLayerParams {
            heads,
            group: 0,
            layer: 0,
            scale: 0.25,
            keys: AttentionKeyRange::default(),
            sinks: None,
        };
        let width = (heads + 2 * kv_heads) * dim;
        let qkv = numbers(len, width, 6);
        let slot = |p: usize| ([2, 0, 1][p / 16] * 16 + p % 16) as i64;
        let run = |chunk: usize, group: usize| {
            let shape = AttentionLayerParams { group, ..shape };
            let pool = KvPool::new(&ops, layout).unwrap();
            let mut out = Vec::new();
            for from in (0..len).step_by(chunk) {
                let to = len.min(from + chunk);
                let mut inputs = HostBatchMetadata {
                    positions: (from as i32..to as i32).collect(),
                    slots: (from..to).map(slot).collect(),
                    cu_q: vec![0, (to - from) as i32],
                    context_lens: vec![to as i32],
                    block_tables: vec![2, 0, 1, -1],
                    further_groups: vec![],
                    state_slots: vec![],
                };
                if group > 0 {
                    // The layer is in group 1; nothing is stored in group 0.
                    let block_tables = std::mem::replace(&mut inputs.block_tables, vec![-1; 4]);
                    let slots = std::mem::replace(&mut inputs.slots, vec![-1; to - from]);
                    inputs.further_groups = vec![HostGroupTables { slots, block_tables }];
                }
                let batch = DeviceBatchMetadata::new(&ops, &inputs).unwrap();
                assert_eq!((batch.tokens(), batch.rows()), (to - from, 1));
                let x = &qkv[from * width..to * width];
                let x = ops.floats(x, dtype, &[to - from, width]).unwrap();
                let q = ops.qk_norm_rope_kv_write(&x, &weights, &shape, &pool, &batch).unwrap();
                let o = ops.paged_attention(&q, &shape, &pool, &batch).unwrap();
                out.extend(ops.read_f32(&o).unwrap());
            }
            // The value of the last token and second head must be in the KV pool as in `qkv`.
            let (_, value) = pool.read_slot(&ops, [0, 0], slot(len - 1) as usize, 1).unwrap();
            assert_eq!(value, qkv[len * width - dim..]);
            assert!(pool.read_slot(&ops, [0, 0], 64, 0).is_err());
            out
        };
        let whole = run(len, 0);
        for (chunk, group) in [(1, 0), (7, 0), (16, 0), (len, 1), (7, 1)] {
            assert_eq!(run(chunk, group), whole);
        }
    }
}

#[test]
fn shape_errors_report_sizes() {
    let ops = ops(DType::F32);
    let weights = bytes(&numbers(4, 6, 7));
    let linear = ops.pack_linear(&[host(&weights, 4, 6)], None).unwrap();
    let x = ops.floats(&[0.0; 10], DType::F32, &[2, 5]).unwrap();
    let error = ops.linear(&x, &linear).unwrap_err();
    assert_eq!(error.to_string(), "linear: inputs is [5], expected [6]");
    assert!(matches!(ops.pack_linear(&[], Some(&[1.0])), Err(OpError::Shape { .. })));
    let gate_up = [vec![host(&weights, 4, 6)]];
    assert!(ops.pack_experts(0, 1, &gate_up, &gate_up, GateActivation::Silu).is_err());
    let error = Ops::new(ops.device().clone(), DType::F8E4M3).unwrap_err().to_string();
    assert_eq!(error, format!("{} does not support activations in F8E4M3", ops.device().name()));
}

/// Samples two logits rows in two sequence slots. The second row contains a NaN, which must not affect the
/// first one.
#[test]
fn logits_rows_are_sampled_independently() {
    let ops = ops(DType::F32);
    let size = StepBufferLimits {
        tokens: 4,
        rows: 2,
        logits_rows: 3,
        top_logprobs: 2,
        stage_bytes: 4096,
        groups: 1,
        block_tokens: 16,
        verification: DraftVerification::NoDrafts,
    };
    let mut buffers = StepBuffers::new(&ops, size).unwrap();
    let limits =
        SequenceSlotLimits { seq_slots: 2, groups: 1, table_width: 1, max_len: 16, vocab: 3 };
    let mut seq_slots = DeviceSequenceSlots::new(&ops, limits).unwrap();
    let mut stage = StagingBuffer::default();
    for seq_slot in 0..2 {
        let params = SequenceSamplingParams {
            top_p: 1.0,
            repetition: 1.0,
            ..SequenceSamplingParams::default()
        };
        stage.inits.push(StagedSequenceInit {
            seq_slot,
            mask_at: -1,
            params,
            ..StagedSequenceInit::default()
        });
        let logits_row = StagedLogitsRow {
            token: seq_slot,
            seq_slot,
            known_token: -1,
            top: -1,
            ..Default::default()
        };
        stage.logits_rows.push(logits_row);
    }
    stage.logits_rows[0].top = 2;
    let shape = StepShape { logits_rows: 2, ..StepShape::default() };
    let memory = ops.device().alloc_pinned(size.stage_bytes).unwrap();
    buffers.upload(&ops, &stage, memory).unwrap().wait().unwrap();
    buffers.prepare(&ops, &mut seq_slots, shape).unwrap();
    let l = [0.0, 2.0, 1.0, f32::NAN, 0.0, 0.0];
    let logits = ops.floats(&l, DType::F32, &[2, 3]).unwrap();
    buffers.sample(&ops, &mut seq_slots, &logits).unwrap();
    let memory = buffers.output_memory(&ops).unwrap();
    let outputs = buffers.download(&ops, memory, 2, true).unwrap().wait().unwrap();
    let sampled: Vec<_> = outputs.iter().collect();
    assert_eq!((sampled[0].token, sampled[0].status, sampled[0].rank), (1, SAMPLE_OK, 1));
    assert_eq!(sampled[1].status, SAMPLE_NON_FINITE);
    assert_eq!(outputs.top(0, 2).map(|(id, _)| id).collect::<Vec<_>>(), [1, 2]);
}
