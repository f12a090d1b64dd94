//! The registry's calls: registering, connecting and validating.
//!
//! Invariant: every call first looks the token up in the store; every URL and authorization that it returns
//! is signed, expires soon, and names its registration.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use codex_exec_remote::{
    ConnectRequest, ConnectResponse, EnvironmentStatus, ExecutorResponse, NoiseKeyJson,
    RegisterRequest, RegisterResponse, SECURITY_PROFILE, ValidateRequest, ValidateResponse,
};

use crate::api_error::ApiError;
use crate::cluster::Presence;
use crate::config::Config;
use crate::fingerprint::fingerprint;
use crate::hub::{Hub, Seat, SeatError, SocketOwner};
use crate::metrics::Metrics;
use crate::rate::Limited;
use crate::secret::{SigningKey, digest, random_name};
use crate::socket::{REGISTERED_AGAIN, REMOVED};
use crate::store::{Registration, Store};
use crate::ticket::{Kind, Ticket};
use crate::token::{Right, TokenRecord};

/// The path of websockets.
pub(crate) const RENDEZVOUS_PATH: &str = "/rendezvous/v1";

/// The registry.
#[derive(Debug)]
pub(crate) struct Registry {
    config: Arc<Config>,
    metrics: Arc<Metrics>,
    store: Store,
    key: SigningKey,
    pub hub: Arc<Hub>,
}

/// The client that calls, and the base URL to give it.
#[derive(Debug)]
pub(crate) struct Caller<'a> {
    /// The token of `Authorization: Bearer`.
    pub token: Option<&'a str>,
    pub address: IpAddr,
    /// `ws://…` or `wss://…`, without a trailing slash.
    pub websocket_base: String,
}

impl Registry {
    pub(crate) fn new(
        config: Arc<Config>,
        metrics: Arc<Metrics>,
        store: Store,
        hub: Arc<Hub>,
    ) -> Self {
        Self { config, metrics, key: store.signing_key(), store, hub }
    }

    /// POST `/cloud/environment/{id}/register`
    pub(crate) async fn register(
        &self,
        caller: &Caller<'_>,
        environment: &str,
        request: impl Future<Output = Result<RegisterRequest, ApiError>>,
    ) -> Result<RegisterResponse, ApiError> {
        let token = self.authorize(caller, Right::Register, environment).await?;
        let request = request.await?;
        if request.security_profile != SECURITY_PROFILE {
            return Err(ApiError::Body("security_profile is not noise_hybrid_ik_v1"));
        }
        let key = Some(request.executor_public_key);
        let (registration, url) = self.store_registration(caller, environment, key, &token).await?;
        Ok(RegisterResponse {
            environment_id: environment.to_owned(),
            url: url.into(),
            security_profile: SECURITY_PROFILE.to_owned(),
            executor_registration_id: registration,
        })
    }

    /// POST `/cloud/executor/{id}/register`
    pub(crate) async fn register_executor(
        &self,
        caller: &Caller<'_>,
        executor: &str,
    ) -> Result<ExecutorResponse, ApiError> {
        let token = self.authorize(caller, Right::Register, executor).await?;
        let (_, url) = self.store_registration(caller, executor, None, &token).await?;
        Ok(ExecutorResponse { executor_id: executor.to_owned(), url: url.into() })
    }

    async fn store_registration(
        &self,
        caller: &Caller<'_>,
        environment: &str,
        executor_key: Option<NoiseKeyJson>,
        token: &TokenRecord,
    ) -> Result<(String, String), ApiError> {
        self.limit_calls(token)?;
        let now = self.config.clock.now();
        let id = random_name("reg_").map_err(random_source_failed)?;
        let registration = Registration {
            environment: environment.to_owned(),
            id: id.clone(),
            executor_key,
            token: token.id.clone(),
            registered: now,
            online_since: None,
            last_seen: now,
            node: None,
        };
        self.store.register(registration).await.map_err(|error| self.store_failed(error))?;
        self.hub.replace(environment, Some(&id), REGISTERED_AGAIN);
        tracing::info!(environment, registration = id, token = token.id, "registered");
        let url = self.issue_pass(caller, Kind::EnvironmentPass, environment, &id, None, token)?;
        Ok((id, url))
    }

    /// POST `/cloud/environment/{id}/connect`
    pub(crate) async fn connect(
        &self,
        caller: &Caller<'_>,
        environment: &str,
        request: impl Future<Output = Result<ConnectRequest, ApiError>>,
    ) -> Result<ConnectResponse, ApiError> {
        let token = self.authorize(caller, Right::Connect, environment).await?;
        let request = request.await?;
        let registration = self.online(&token, environment).await?;
        let executor_public_key = registration.executor_key.ok_or(ApiError::NotEncrypted)?;
        let harness = Some(fingerprint(&request.harness_public_key.0));
        let id = registration.id;
        let url =
            self.issue_pass(caller, Kind::HarnessPass, environment, &id, harness.clone(), &token)?;
        let ticket = Ticket {
            kind: Kind::Authorization,
            environment: environment.to_owned(),
            registration: id.clone(),
            harness,
            token: token.id,
            expires: self.config.clock.now() + self.config.authorization_lifetime.as_secs(),
            nonce: random_name("").map_err(random_source_failed)?,
        };
        Ok(ConnectResponse {
            environment_id: environment.to_owned(),
            url: url.into(),
            security_profile: SECURITY_PROFILE.to_owned(),
            executor_registration_id: id,
            executor_public_key,
            harness_key_authorization: ticket.seal(&self.key).expose().into(),
        })
    }

    /// POST `/cloud/executor/{id}/connect`, for harnesses of the older revision.
    pub(crate) async fn connect_executor(
        &self,
        caller: &Caller<'_>,
        executor: &str,
    ) -> Result<ExecutorResponse, ApiError> {
        let token = self.authorize(caller, Right::Connect, executor).await?;
        let registration = self.online(&token, executor).await?;
        if registration.executor_key.is_some() {
            return Err(ApiError::Encrypted);
        }
        let harness = Some(random_name("").map_err(random_source_failed)?);
        let id = registration.id;
        let url = self.issue_pass(caller, Kind::HarnessPass, executor, &id, harness, &token)?;
        Ok(ExecutorResponse { executor_id: executor.to_owned(), url: url.into() })
    }

    async fn online(
        &self,
        token: &TokenRecord,
        environment: &str,
    ) -> Result<Registration, ApiError> {
        self.limit_calls(token)?;
        let registration = self.registration(environment).await?;
        let registration = registration.ok_or(ApiError::UnknownEnvironment)?;
        if self.hub.presences(&[&registration]).await.pop().flatten().is_none() {
            return Err(ApiError::Offline);
        }
        Ok(registration)
    }

    /// POST `/cloud/environment/{id}/validate`
    pub(crate) async fn validate(
        &self,
        caller: &Caller<'_>,
        environment: &str,
        request: impl Future<Output = Result<ValidateRequest, ApiError>>,
    ) -> Result<ValidateResponse, ApiError> {
        self.authorize(caller, Right::Register, environment).await?;
        let request = request.await?;
        let now = self.config.clock.now();
        let invalid = ValidateResponse { valid: false, principal: None };
        let Some(ticket) = Ticket::open(request.harness_key_authorization.expose(), &self.key)
        else {
            return Ok(invalid);
        };
        let current = self.registration(environment).await?;
        let good = ticket.kind == Kind::Authorization
            && ticket.environment == environment
            && ticket.registration == request.executor_registration_id
            && current.is_some_and(|current| current.id == ticket.registration)
            && ticket.harness == Some(fingerprint(&request.harness_public_key.0))
            && ticket.expires > now
            && self.token_permits(&ticket.token, Right::Connect, environment).await?;
        if !good {
            return Ok(invalid);
        }
        // Last, since it cannot be undone.
        let used = self.store.use_once(&ticket.nonce, ticket.expires, now).await;
        match used.map_err(|error| self.store_failed(error))? {
            true => Ok(ValidateResponse { valid: true, principal: Some(ticket.token) }),
            false => Ok(invalid),
        }
    }

    /// Checks the pass of a websocket and reserves its seat.
    pub(crate) async fn seat(&self, pass: Option<&str>, from: IpAddr) -> Result<Seat, ApiError> {
        let Some(ticket) = pass.and_then(|pass| Ticket::open(pass, &self.key)) else {
            return Err(self.authentication_failed(from));
        };
        let right = match ticket.kind {
            Kind::EnvironmentPass => Right::Register,
            Kind::HarnessPass => Right::Connect,
            Kind::Authorization => return Err(self.authentication_failed(from)),
        };
        if !self.token_permits(&ticket.token, right, &ticket.environment).await? {
            return Err(ApiError::Forbidden);
        }
        let registration = self.registration(&ticket.environment).await?;
        let Some(registration) = registration.filter(|current| current.id == ticket.registration)
        else {
            return Err(ApiError::Replaced);
        };
        if !self.is_pass_usable(&ticket, &registration).await? {
            return Err(ApiError::PassExpired);
        }
        let owner = SocketOwner {
            environment: ticket.environment,
            registration: ticket.registration,
            token: ticket.token,
            harness: ticket.harness,
        };
        self.hub.seat(owner, &registration).await.map_err(|error| match error {
            SeatError::Replaced => ApiError::Replaced,
            SeatError::Full => ApiError::TooManyHarnesses,
            SeatError::CutOff => self.limited(),
            SeatError::Offline => ApiError::Offline,
            SeatError::Store(error) => self.store_failed(error),
        })
    }

    /// A pass expires soon, but a client that is or was recently connected may reconnect with it.
    async fn is_pass_usable(
        &self,
        ticket: &Ticket,
        current: &Registration,
    ) -> Result<bool, ApiError> {
        let now = self.config.clock.now();
        let window = self.config.reconnect_window.as_secs();
        if now < ticket.expires {
            return Ok(true);
        }
        let here = self.hub.get(&ticket.environment);
        let here = here.filter(|known| known.registration == ticket.registration);
        let Some(harness) = &ticket.harness else {
            // An environment at a node that died counts as connected until now.
            return Ok(here.is_some()
                || current.node.is_some()
                || now < current.last_seen + window);
        };
        if here.is_some_and(|here| here.knows(harness)) {
            return Ok(true);
        }
        let seen = self.store.harness_last_seen(&current.id, harness).await;
        let seen = seen.map_err(|error| self.store_failed(error))?;
        Ok(seen.is_some_and(|at| now < at + window))
    }

    // --- who is there ---

    /// GET `/cloud/environments`
    pub(crate) async fn list(
        &self,
        caller: &Caller<'_>,
    ) -> Result<Vec<EnvironmentStatus>, ApiError> {
        let token = self.authenticate(caller).await?;
        if !token.can.contains(&Right::Manage) {
            return Err(ApiError::Forbidden);
        }
        let all = self.store.registrations().await.map_err(|error| self.store_failed(error))?;
        let own = all.into_iter().filter(|known| token.scope.covers(&known.environment));
        let own: Vec<_> = own.collect();
        let presences = self.hub.presences(&own.iter().collect::<Vec<_>>()).await;
        let both = own.into_iter().zip(presences);
        Ok(both.map(|(known, presence)| self.status(known, presence)).collect())
    }

    /// GET `/cloud/environment/{id}`
    pub(crate) async fn show(
        &self,
        caller: &Caller<'_>,
        environment: &str,
    ) -> Result<EnvironmentStatus, ApiError> {
        self.authorize(caller, Right::Manage, environment).await?;
        let registration = self.registration(environment).await?;
        let known = registration.ok_or(ApiError::UnknownEnvironment)?;
        let presence = self.hub.presences(&[&known]).await.pop().flatten();
        Ok(self.status(known, presence))
    }

    /// DELETE `/cloud/environment/{id}`
    pub(crate) async fn remove(
        &self,
        caller: &Caller<'_>,
        environment: &str,
    ) -> Result<(), ApiError> {
        self.authorize(caller, Right::Manage, environment).await?;
        let removed = self.store.remove(environment).await;
        if !removed.map_err(|error| self.store_failed(error))? {
            return Err(ApiError::UnknownEnvironment);
        }
        self.hub.replace(environment, None, REMOVED);
        tracing::info!(environment, "removed");
        Ok(())
    }

    fn status(&self, known: Registration, presence: Option<Presence>) -> EnvironmentStatus {
        let now = self.config.clock.now();
        EnvironmentStatus {
            online: presence.is_some(),
            online_since: presence.map(|presence| presence.since),
            last_seen: if presence.is_some() { now } else { known.last_seen },
            registered: known.registered,
            executor_registration_id: known.id,
            security_profile: known.executor_key.map(|_| SECURITY_PROFILE.to_owned()),
            token: known.token,
            environment_id: known.environment,
            harnesses: presence.map_or(0, |presence| presence.harnesses),
            streams: presence.map_or(0, |presence| presence.streams),
        }
    }

    // --- tokens ---

    async fn authorize(
        &self,
        caller: &Caller<'_>,
        right: Right,
        environment: &str,
    ) -> Result<TokenRecord, ApiError> {
        let token = self.authenticate(caller).await?;
        if !token.permits(right, environment) {
            return Err(ApiError::Forbidden);
        }
        Ok(token)
    }

    async fn authenticate(&self, caller: &Caller<'_>) -> Result<TokenRecord, ApiError> {
        let Some(token) = caller.token else {
            return Err(self.authentication_failed(caller.address));
        };
        let found = self.store.token_by_digest(&digest(token.as_bytes())).await;
        let now = self.config.clock.now();
        match found.map_err(|error| self.store_failed(error))? {
            Some(record) if !record.is_expired(now) => Ok(record),
            _ => Err(self.authentication_failed(caller.address)),
        }
    }

    async fn token_permits(
        &self,
        id: &str,
        right: Right,
        environment: &str,
    ) -> Result<bool, ApiError> {
        let found = self.store.token_by_id(id).await.map_err(|error| self.store_failed(error))?;
        let now = self.config.clock.now();
        Ok(found.is_some_and(|token| !token.is_expired(now) && token.permits(right, environment)))
    }

    /// Counts a wrong token or URL. The limit never applies to valid ones, so a client cannot lock others
    /// at the same address out.
    fn authentication_failed(&self, from: IpAddr) -> ApiError {
        self.metrics.authentication_failures.fetch_add(1, Relaxed);
        let permitted = self.hub.try_take(Limited::Failure(from));
        if permitted { ApiError::Unauthorized } else { self.limited() }
    }

    fn limit_calls(&self, token: &TokenRecord) -> Result<(), ApiError> {
        let permitted = self.hub.try_take(Limited::Call(token.id.clone()));
        if permitted { Ok(()) } else { Err(self.limited()) }
    }

    fn limited(&self) -> ApiError {
        self.metrics.limited.fetch_add(1, Relaxed);
        ApiError::Limited
    }

    // --- inside ---

    /// Fails while calls cannot be served.
    pub(crate) fn ready(&self) -> Result<(), ApiError> {
        self.store.ready().map_err(|_| ApiError::Store)
    }

    async fn registration(&self, environment: &str) -> Result<Option<Registration>, ApiError> {
        self.store.registration(environment).await.map_err(|error| self.store_failed(error))
    }

    fn store_failed(&self, error: crate::store::StoreError) -> ApiError {
        self.metrics.store_errors.fetch_add(1, Relaxed);
        error.into()
    }

    fn issue_pass(
        &self,
        caller: &Caller<'_>,
        kind: Kind,
        environment: &str,
        registration: &str,
        harness: Option<String>,
        token: &TokenRecord,
    ) -> Result<String, ApiError> {
        let ticket = Ticket {
            kind,
            environment: environment.to_owned(),
            registration: registration.to_owned(),
            harness,
            token: token.id.clone(),
            expires: self.config.clock.now() + self.config.url_lifetime.as_secs(),
            nonce: random_name("").map_err(random_source_failed)?,
        };
        let pass = ticket.seal(&self.key);
        Ok(format!("{}{RENDEZVOUS_PATH}?pass={}", caller.websocket_base, pass.expose()))
    }
}

#[allow(clippy::needless_pass_by_value, reason = "passed to map_err")]
fn random_source_failed(error: io::Error) -> ApiError {
    tracing::error!(%error, "cannot get random bytes from the system");
    ApiError::Store
}
