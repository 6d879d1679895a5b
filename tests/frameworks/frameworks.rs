//! The layer and the `Deduplicator` in `lambda_http` and tonic, as the guide's page on frameworks says. Nothing
//! listens: events and calls go to the services.

mod grpc;
mod lambda;
