//! How an operator lets an event run again: forgetting its key.

use std::time::Duration;

use super::super::replies::Forgotten;
use super::super::stored::Fetch;
use super::super::terms::{CallTerms, Token};
use super::call::Rows;
use super::engine::Dialect;
use super::rounds::ROUNDS;
use crate::error::Error;
use crate::key::DedupKey;

/// Forgets a key, unless a live lease or an open transaction holds it.
pub(in crate::adapter) async fn forget<D: Dialect>(
    dialect: &mut D,
    key: &DedupKey,
    hash: impl Fn(&DedupKey) -> u128,
) -> Result<Forgotten, Error> {
    const CONTEXT: &str = "forgetting a key";
    // The statement does not use its terms.
    let terms = CallTerms::on_claim(Token::from([0; 16]), Duration::ZERO);
    let rows = Rows::of_call(std::slice::from_ref(key), &terms, hash);
    for _ in 0..ROUNDS {
        let read = dialect.read(&rows, Fetch::Nothing).await;
        let read = read.map_err(|error| dialect.error(CONTEXT, error))?;
        match read.into_iter().flatten().next() {
            Some(row) if row.is_leased().unwrap_or(false) => return Ok(Forgotten::InFlight),
            // An unreadable row is forgotten too: it blocks its event.
            Some(row) if !row.is_expired() => {
                let forgotten = dialect.forget(&rows, &[row.version]).await;
                if forgotten.map_err(|error| dialect.error(CONTEXT, error))? == [true] {
                    return Ok(Forgotten::Removed);
                }
                // Another call has written the row since: try again.
            }
            _ => {
                // A transaction that runs the key holds its lock, and has no visible row yet.
                let is_held = dialect.is_held_by_transaction(&rows[0]).await;
                let is_held = is_held.map_err(|error| dialect.error(CONTEXT, error))?;
                return Ok(if is_held { Forgotten::InFlight } else { Forgotten::Missing });
            }
        }
    }
    Ok(Forgotten::InFlight)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::super::super::replies::Claimed;
    use super::super::row::Row;
    use super::super::table::Table;
    use super::*;

    /// Another call writes the row after it was read.
    #[tokio::test]
    async fn forgetting_is_repeated_only_if_the_row_has_become_free() {
        let minute = Duration::from_secs(60);
        let complete = CallTerms::on_claim(Token::random(), minute);
        let leased = CallTerms::on_completion(Token::random(), minute, minute);
        let key = DedupKey::new("a", "1").unwrap();
        let row = |terms| Row::row_after(&key, terms, &Claimed::first(1, false));
        let expired = Row { now: i64::MAX, ..row(&complete) };
        for (row, held, forgets, reply, sent) in [
            (Some(row(&complete)), false, Some(1), Forgotten::Removed, 1),
            (Some(row(&complete)), false, Some(2), Forgotten::Removed, 2),
            (Some(row(&complete)), false, None, Forgotten::InFlight, ROUNDS),
            (Some(row(&leased)), false, Some(1), Forgotten::InFlight, 0),
            (Some(expired), false, Some(1), Forgotten::Missing, 0),
            (None, false, Some(1), Forgotten::Missing, 0),
            (None, true, Some(1), Forgotten::InFlight, 0),
        ] {
            let rows: HashMap<_, _> = row.map(|row| (1, row)).into_iter().collect();
            let held = held.then_some(1).into_iter().collect();
            let mut table = Table { rows, held, forgets, ..Table::default() };
            assert_eq!(forget(&mut table, &key, |_| 1).await.unwrap(), reply);
            assert_eq!(table.sent_forgets, sent);
        }
    }
}
