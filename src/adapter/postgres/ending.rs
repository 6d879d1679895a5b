//! The messages that end what a transaction has claimed: several statements each, so that they cost one
//! round trip. Statements that share a message have no parameters, so the keys are in the text.

use sqlx::Row;
use sqlx::postgres::PgRow;

use super::rows::Uuid;
use super::schema::{Durability, literal};
use super::statements::{NOW, Statements, TAG};

/// The transaction that claimed.
#[derive(Debug)]
pub(super) struct Begun {
    xid: u64,
    /// As `current_setting` says it: a name, or `none`.
    role: String,
}

impl Begun {
    pub(super) fn new(row: &PgRow) -> Result<Self, sqlx::Error> {
        let xid: &str = row.try_get("xid")?;
        let xid = xid.parse().map_err(|error| sqlx::Error::Decode(Box::new(error)))?;
        Ok(Self { xid, role: row.try_get("role")? })
    }

    /// An expression that sets the role of the claim again where the handler has set another one, which
    /// may not write the table. Its value is never the empty string. The handler's role is noted in a
    /// setting of the transaction, since one message cannot read and then use it. `CASE` gives the
    /// order.
    fn role(&self) -> String {
        let role = literal(&self.role);
        format!(
            "CASE WHEN current_setting('role') <> {role} \
             THEN CASE WHEN set_config('tower_dedup.role', current_setting('role'), true) IS NOT NULL \
             THEN set_config('role', {role}, true) END END"
        )
    }
}

/// Sets the handler's role again: its deferred constraints are checked by the COMMIT.
const BACK: &str = "SELECT WHERE CASE WHEN coalesce(current_setting('tower_dedup.role', true), '') <> '' \
    THEN set_config('role', current_setting('tower_dedup.role'), true) END = ''";

/// As an array.
fn uuids(keys: &[Uuid]) -> String {
    let keys: Vec<_> = keys.iter().map(Uuid::to_string).collect();
    format!("'{{{}}}'::uuid[]", keys.join(","))
}

impl Statements {
    /// Gives keys back, in one message: as a rollback would leave them. Rows that this claim inserted
    /// are deleted. Rows that it took have one attempt less, and where it was a takeover, the next
    /// claim is one again.
    pub(super) fn give_back(&self, begun: &Begun, keys: &[Uuid], token: Uuid) -> String {
        let (table, role, keys) = (&self.table, begun.role(), uuids(keys));
        let of_claim = format!("key = ANY ({keys}) AND token = '{token}' AND completed_at IS NULL");
        format!(
            "{TAG}SELECT WHERE {role} = ''; \
             {TAG}WITH made AS (DELETE FROM {table} WHERE {of_claim} AND attempts = 1) \
             UPDATE {table} SET attempts = attempts - 1, \
             token = CASE WHEN takeover THEN token END, \
             lease_until = CASE WHEN takeover THEN {NOW} END \
             WHERE {of_claim} AND attempts > 1; {TAG}{BACK}"
        )
    }

    /// What comes before anything that completes keys, and returns no row: the COMMIT is durable, and
    /// the role is the claim's.
    pub(super) fn end(&self, begun: &Begun) -> String {
        format!(
            "{TAG}SELECT WHERE ({}) = '' OR {} = ''",
            Durability::Synchronous.setting(),
            begun.role()
        )
    }

    /// Completes keys in the transaction that claimed them, in one message with what comes before.
    /// `top` is false for a row that is written under a savepoint, because `xmin` is the savepoint's
    /// number then: the handler may have leaked one.
    ///
    /// A completion is never expired at birth: a handler may run for longer than `retention`, in
    /// milliseconds, which was counted from the claim.
    pub(super) fn commit(
        &self,
        begun: &Begun,
        keys: &[Uuid],
        token: Uuid,
        retention: i64,
    ) -> String {
        let (table, end, keys) = (&self.table, self.end(begun), uuids(keys));
        format!(
            "{end}; {TAG}UPDATE {table} AS t SET completed_at = {NOW}, lease_until = NULL, \
             expires_at = CASE WHEN t.expires_at <= {NOW} \
             THEN {NOW} + {retention} * interval '1 millisecond' ELSE t.expires_at END \
             WHERE t.key = ANY ({keys}) AND t.token = '{token}' AND t.completed_at IS NULL \
             AND pg_current_xact_id_if_assigned()::text = '{}' \
             RETURNING t.xmin = pg_current_xact_id()::xid AS top; {TAG}{BACK}",
            begun.xid,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::schema::Place;
    use super::*;

    #[test]
    fn every_statement_of_a_message_begins_with_the_tag() {
        let statements = Statements::new(&Place::default(), Durability::Synchronous);
        for role in ["none", "a \"role\""] {
            let begun = Begun { xid: 7, role: role.to_owned() };
            let (keys, token) = (&[Uuid([1; 16])], Uuid([2; 16]));
            for (message, statements) in [
                (statements.give_back(&begun, keys, token), 3),
                (statements.commit(&begun, keys, token, 1), 3),
            ] {
                assert!(message.starts_with(TAG), "{message}");
                assert_eq!(message.matches(TAG).count(), statements, "{message}");
            }
        }
    }
}
