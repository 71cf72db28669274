//! Formats KV events as rows of a table.

use metrics::kv_events::{DecodedKvEvent, ExternalBlockHash};

/// Header line with the names of the columns.
pub(super) const HEADER: &str = "TIME (UTC)    SEQUENCE          RANK  EVENT    BLOCKS  TOKENS  \
                                 MEDIUM   FIRST HASH        PARENT";

/// Formats one event as a table row.
pub(super) fn row(seq: u64, ts: f64, rank: Option<u32>, event: &DecodedKvEvent) -> String {
    let rank = rank.map_or_else(|| "-".to_owned(), |rank| rank.to_string());
    let head = format!("{:<12}  {seq:<16}  {rank:>4}", time_of_day(ts));
    match event {
        DecodedKvEvent::BlockStored(stored) => {
            let parent = hash_or_dash(stored.parent_block_hash.as_ref());
            let notes = stored.lora_name.iter().map(|name| format!("  lora {name}"));
            let extra = stored.extra_keys.iter().map(|keys| format!("  keys {}", shown(keys)));
            format!(
                "{head}  stored   {:>6}  {:>6}  {:<7}  {:<16}  {parent}{}",
                stored.block_hashes.len(),
                stored.token_ids.len(),
                stored.medium.as_deref().unwrap_or("-"),
                hash_or_dash(stored.block_hashes.first()),
                notes.chain(extra).collect::<String>(),
            )
        }
        DecodedKvEvent::BlockRemoved(removed) => format!(
            "{head}  removed  {:>6}  {:>6}  {:<7}  {}",
            removed.block_hashes.len(),
            "-",
            removed.medium.as_deref().unwrap_or("-"),
            hash_or_dash(removed.block_hashes.first()),
        ),
        DecodedKvEvent::AllBlocksCleared => format!("{head}  cleared     all"),
    }
}

fn hash_or_dash(hash: Option<&ExternalBlockHash>) -> String {
    hash.map_or_else(|| "-".to_owned(), ExternalBlockHash::to_string)
}

fn shown(keys: &[Option<Vec<serde_json::Value>>]) -> String {
    serde_json::to_string(&keys.iter().flatten().flatten().collect::<Vec<_>>()).unwrap_or_default()
}

/// Formats a unix time as `HH:MM:SS.mmm`.
fn time_of_day(ts: f64) -> String {
    let ms = (ts * 1e3) as u64 % 86_400_000;
    let (s, ms) = (ms / 1000, ms % 1000);
    format!("{:02}:{:02}:{:02}.{ms:03}", s / 3600, s / 60 % 60, s % 60)
}

#[cfg(test)]
mod tests {
    use super::*;
    use expect_test::expect;
    use metrics::kv_events::{BlockRemoved, BlockStored};

    fn stored_blocks() -> DecodedKvEvent {
        DecodedKvEvent::BlockStored(BlockStored {
            block_hashes: vec![
                ExternalBlockHash::Number(0x73f8_59a0_4f66_9e6d),
                ExternalBlockHash::Number(2),
            ],
            parent_block_hash: Some(ExternalBlockHash::Number(1)),
            token_ids: vec![1; 32],
            block_size: 16,
            lora_id: None,
            medium: Some("GPU".to_owned()),
            lora_name: None,
            extra_keys: Some(vec![Some(vec!["tenant-a".into()]), None]),
            group_idx: Some(0),
            kv_cache_spec_kind: None,
            kv_cache_spec_sliding_window: None,
        })
    }

    #[test]
    fn rows_align_with_the_header() {
        let stored = stored_blocks();
        let removed = DecodedKvEvent::BlockRemoved(BlockRemoved {
            block_hashes: vec![ExternalBlockHash::Bytes(vec![0xab, 1])],
            medium: None,
            group_idx: None,
        });
        let row = |event| row(1_763_758_800_123_456, 1_763_758_800.25, Some(0), event);
        let rows = [
            HEADER.to_owned(),
            row(&stored),
            row(&removed),
            row(&DecodedKvEvent::AllBlocksCleared),
        ];
        expect![[r#"
            TIME (UTC)    SEQUENCE          RANK  EVENT    BLOCKS  TOKENS  MEDIUM   FIRST HASH        PARENT
            21:00:00.250  1763758800123456     0  stored        2      32  GPU      73f859a04f669e6d  0000000000000001  keys ["tenant-a"]
            21:00:00.250  1763758800123456     0  removed       1       -  -        ab01
            21:00:00.250  1763758800123456     0  cleared     all"#]]
        .assert_eq(&rows.join("\n"));
    }
}
