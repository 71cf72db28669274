//! KV events that are encoded and decoded again are unchanged, in both formats (maps and arrays).

use metrics::kv_events::KvEventFormat;
use metrics::kv_events::{DecodedKvEvent, EventJournal, ExternalBlockHash, KvEventEncoder, decode};
use proptest::collection::vec;
use proptest::prelude::*;
use protocol::{BlockHash, ExtraKey, KvEvent};

const BLOCK_TOKENS: u32 = 2;

fn hash() -> impl Strategy<Value = BlockHash> {
    let bits = 0..64_u32;
    (bits, 1..=u64::MAX).prop_map(|(bits, value)| BlockHash((value >> bits).max(1)))
}

fn extra() -> impl Strategy<Value = Vec<ExtraKey>> {
    let key =
        prop_oneof![".{0,40}".prop_map(ExtraKey::Salt), "[a-z]{1,300}".prop_map(ExtraKey::Lora),];
    vec(key, 0..3)
}

fn event() -> impl Strategy<Value = KvEvent> {
    let run = vec((hash(), any::<[u32; BLOCK_TOKENS as usize]>(), extra()), 1..40);
    prop_oneof![
        (run, proptest::option::of(hash()), 0..3_u8).prop_map(|(run, parent, group)| {
            KvEvent::Stored {
                hashes: run.iter().map(|(hash, ..)| *hash).collect(),
                parent,
                tokens: run.iter().flat_map(|(_, ids, _)| *ids).collect(),
                extra_keys: run.into_iter().map(|(.., extra)| extra).collect(),
                group,
            }
        }),
        (vec(hash(), 1..300), 0..3_u8)
            .prop_map(|(hashes, group)| KvEvent::Removed { hashes, group }),
        Just(KvEvent::Cleared),
    ]
}

fn number(hash: BlockHash) -> ExternalBlockHash {
    ExternalBlockHash::Number(hash.0)
}

/// Whether a decoded event equals the event that was encoded.
fn same(event: &KvEvent, read: &DecodedKvEvent) -> bool {
    match (event, read) {
        (KvEvent::Cleared, DecodedKvEvent::AllBlocksCleared) => true,
        (KvEvent::Removed { hashes, group }, DecodedKvEvent::BlockRemoved(read)) => {
            read.block_hashes.iter().eq(&hashes.iter().copied().map(number).collect::<Vec<_>>())
                && read.group_idx == Some(u32::from(*group))
                && read.medium.as_deref() == Some("GPU")
        }
        (
            KvEvent::Stored { hashes, parent, tokens, extra_keys, group },
            DecodedKvEvent::BlockStored(read),
        ) => {
            let texts = |keys: &Vec<ExtraKey>| {
                let text = |(ExtraKey::Lora(text) | ExtraKey::Salt(text)): &ExtraKey| text.clone();
                keys.iter().map(text).map(serde_json::Value::from).collect::<Vec<_>>()
            };
            let extra = extra_keys.iter().map(|keys| (!keys.is_empty()).then(|| texts(keys)));
            let extra: Vec<_> = extra.collect();
            read.block_hashes.iter().eq(&hashes.iter().copied().map(number).collect::<Vec<_>>())
                && read.parent_block_hash == parent.map(number)
                && read.token_ids == *tokens
                && read.block_size == BLOCK_TOKENS
                && read.group_idx == Some(u32::from(*group))
                && read.kv_cache_spec_kind.as_deref() == (*group == 0).then_some("full_attention")
                && read.extra_keys == extra.iter().any(Option::is_some).then_some(extra)
        }
        _ => false,
    }
}

fn encoder(format: KvEventFormat) -> KvEventEncoder {
    KvEventEncoder {
        format,
        rank: 3,
        block_tokens: BLOCK_TOKENS,
        medium: "GPU",
        kinds: vec![protocol::KvKind::Full],
        token_ids: true,
    }
}

proptest! {
    #[test]
    fn encoded_events_decode_to_themselves(events in vec(event(), 0..20), ts in 0.0..4e9_f64) {
        for format in [KvEventFormat::Map, KvEventFormat::Array] {
            let payload = encoder(format).batch(ts, &events).unwrap();
            let read = decode(&payload).unwrap();
            prop_assert_eq!((read.ts, read.data_parallel_rank), (ts, Some(3)));
            prop_assert_eq!(read.events.len(), events.len());
            for (event, read) in events.iter().zip(&read.events) {
                prop_assert!(same(event, read), "{event:?} became {read:?}");
            }
        }
    }

    #[test]
    fn untrusted_bytes_never_panic(bytes in vec(any::<u8>(), 0..200)) {
        let _ = decode(&bytes); // Random bytes may give an error, but must not panic.
    }

    #[test]
    fn replay_follows_the_journal(published in 1..30_u64, steps in 0..40_usize, start in 0..60_u64) {
        let mut journal = EventJournal::new(encoder(KvEventFormat::Map), 10, steps);
        let live: Vec<_> =
            (0..published).map(|i| journal.append(i as f64, &[KvEvent::Cleared]).unwrap()).collect();
        let last = 10 + published - 1;
        let oldest = (last + 1).saturating_sub(steps as u64).max(10);
        let mut replay = journal.replay(99.0, start).unwrap();
        let mut entries = Vec::new();
        while let Some(entry) = journal.next_batch(99.0, &mut replay).unwrap() {
            entries.push(entry);
        }
        if start >= oldest || oldest == 10 {
            let expected: Vec<_> = live.into_iter().filter(|e| e.seq >= start.max(oldest)).collect();
            prop_assert_eq!(entries, expected);
            prop_assert!(!replay.is_snapshot);
        } else {
            prop_assert!(replay.is_snapshot);
            prop_assert_eq!(entries.len(), 1);
            prop_assert_eq!(entries[0].seq, last);
            let events = decode(&entries[0].payload).unwrap().events;
            prop_assert_eq!(events, [DecodedKvEvent::AllBlocksCleared]);
        }
    }
}
