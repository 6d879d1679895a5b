//! The messages that begin a transaction, and complete or release its keys. Several statements share one message,
//! so that they cost one round trip. They have no parameters, so the keys are in the text.

use sqlx::Row;
use sqlx::postgres::PgRow;

use super::super::sql::statement::{fill, render};
use super::super::terms::CallTerms;
use super::params::Uuid;
use super::schema::literal;
use super::statements::{Statements, TAG};

/// The transaction that claimed.
#[derive(Debug)]
pub(super) struct Begun {
    xid: u64,
    /// The role of the claim, as `current_setting` returns it: a name, or `none`.
    role: String,
}

impl Begun {
    pub(super) fn new(row: &PgRow) -> Result<Self, sqlx::Error> {
        let xid: &str = row.try_get("xid")?;
        let xid = xid.parse().map_err(|error| sqlx::Error::Decode(Box::new(error)))?;
        Ok(Self { xid, role: row.try_get("role")? })
    }

    /// Returns an expression that sets the role of the claim again. Its value is never the empty string.
    fn set_role(&self) -> String {
        render(include_str!("sql/tx_set_role.sql"), &[("role", &literal(&self.role))])
    }
}

/// Returns keys as an array.
fn uuids(keys: &[Uuid]) -> String {
    let keys: Vec<_> = keys.iter().map(Uuid::to_string).collect();
    format!("'{{{}}}'::uuid[]", keys.join(","))
}

impl Statements {
    /// Returns the message that begins a lent transaction.
    pub(super) fn begin(&self, terms: &CallTerms) -> String {
        let idle_ms = terms.transaction_bound_ms().to_string();
        format!("{TAG}BEGIN; {}", fill(&self.tx_begin, &[("idle_ms", &*idle_ms)]))
    }

    /// Returns the message that releases keys while their transaction goes on, before a handler has it.
    pub(super) fn release_in(&self, keys: &[Uuid], token: Uuid) -> String {
        let values = [("keys", &*uuids(keys)), ("token", &*token.to_string())];
        fill(&self.tx_release, &values)
    }

    /// Returns the statement that comes before a statement that completes keys.
    pub(super) fn begin_end(&self, begun: &Begun) -> String {
        fill(&self.tx_begin_end, &[("set_role", &begun.set_role())])
    }

    /// Returns the message that completes keys in the transaction that claimed them. `retention_ms`
    /// counts again from zero for a row that has expired. Without keys, it only checks the transaction.
    pub(super) fn complete_in(
        &self,
        begun: &Begun,
        keys: &[Uuid],
        token: Uuid,
        retention_ms: i64,
    ) -> String {
        let values = [
            ("keys", &*uuids(keys)),
            ("token", &*token.to_string()),
            ("retention_ms", &*retention_ms.to_string()),
            ("xid", &*begun.xid.to_string()),
        ];
        let complete = if keys.is_empty() { &self.tx_is_same } else { &self.tx_complete };
        let (begin_end, complete) = (self.begin_end(begun), fill(complete, &values));
        format!("{begin_end}; {complete}; {}", self.tx_restore_role)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::super::terms::Token;
    use super::super::schema::TableName;
    use super::*;

    #[test]
    fn every_statement_of_a_message_begins_with_the_tag() {
        let statements = Statements::new(&TableName::default(), true);
        let terms = CallTerms::on_claim(Token::random(), Duration::ZERO);
        let begin = statements.begin(&terms.with_transaction_bound_ms(i32::MAX));
        assert!(begin.starts_with(TAG) && begin.matches(TAG).count() == 2, "{begin}");
        assert!(begin.contains("nullif(2147483647 *"), "{begin}");
        let release = statements.release_in(&[Uuid([1; 16])], Uuid([2; 16]));
        assert!(release.starts_with(TAG) && release.matches(TAG).count() == 1, "{release}");
        for role in ["none", "a \"role\"", "{keys}"] {
            let begun = Begun { xid: 7, role: role.to_owned() };
            let (keys, token) = (&[Uuid([1; 16])], Uuid([2; 16]));
            for (message, statements) in [
                (statements.complete_in(&begun, keys, token, 1), 3),
                (statements.complete_in(&begun, &[], token, 1), 3),
            ] {
                assert!(message.starts_with(TAG), "{message}");
                assert_eq!(message.matches(TAG).count(), statements, "{message}");
                assert!(message.contains(&literal(role)), "{message}");
            }
        }
    }
}
