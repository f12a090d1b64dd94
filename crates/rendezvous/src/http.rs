//! HTTP requests: routing, parsing and responses.

use std::net::IpAddr;

use bytes::Bytes;
use codex_exec_remote::ListResponse;
use codex_exec_rpc::websocket_accept;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::header::{
    AUTHORIZATION, CACHE_CONTROL, CONNECTION, CONTENT_TYPE, HOST, HeaderValue, ORIGIN, RETRY_AFTER,
    SEC_WEBSOCKET_ACCEPT, UPGRADE, WWW_AUTHENTICATE,
};
use hyper::http::uri::Authority;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use percent_encoding::percent_decode_str;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::admission::Admission;
use crate::api_error::ApiError;
use crate::registry::Caller;
use crate::service::Service;
use crate::socket;

pub(crate) type HttpResponse = Response<Full<Bytes>>;

/// The room of a request's connection.
pub(crate) type ConnectionPermit = std::sync::Arc<Admission>;

/// The longest environment id, in bytes.
const MAX_ID_LEN: usize = 128;

/// Handles one request.
pub(crate) async fn respond(
    service: &Service,
    from: IpAddr,
    secure: bool,
    request: Request<Incoming>,
    permit: ConnectionPermit,
) -> HttpResponse {
    let (call, result) = route(service, from, secure, request, permit).await;
    let response = result.unwrap_or_else(failure);
    service.metrics().request(call, response.status().as_u16());
    tracing::debug!(call, status = response.status().as_u16(), "request");
    response
}

/// A call of the API.
#[derive(Debug, PartialEq, Eq)]
enum Call {
    Health,
    Ready,
    Metrics,
    Rendezvous,
    List,
    Environment(String),
    Register(String),
    Connect(String),
    Validate(String),
    RegisterExecutor(String),
    ConnectExecutor(String),
}

impl Call {
    fn parse(path: &str) -> Result<Self, ApiError> {
        let mut parts = path.strip_prefix('/').unwrap_or(path).split('/');
        let call = match (parts.next(), parts.next(), parts.next(), parts.next()) {
            (Some("healthz"), None, ..) => Self::Health,
            (Some("readyz"), None, ..) => Self::Ready,
            (Some("metrics"), None, ..) => Self::Metrics,
            (Some("rendezvous"), Some("v1"), None, _) => Self::Rendezvous,
            (Some("cloud"), Some("environments"), None, _) => Self::List,
            (Some("cloud"), Some("environment"), Some(id), None) => Self::Environment(name(id)?),
            (Some("cloud"), Some("environment"), Some(id), Some(call)) => match call {
                "register" => Self::Register(name(id)?),
                "connect" => Self::Connect(name(id)?),
                "validate" => Self::Validate(name(id)?),
                _ => return Err(ApiError::NotFound),
            },
            (Some("cloud"), Some("executor"), Some(id), Some(call)) => match call {
                "register" => Self::RegisterExecutor(name(id)?),
                "connect" => Self::ConnectExecutor(name(id)?),
                _ => return Err(ApiError::NotFound),
            },
            _ => return Err(ApiError::NotFound),
        };
        if parts.next().is_some() { Err(ApiError::NotFound) } else { Ok(call) }
    }

    fn label(&self) -> &'static str {
        match self {
            Self::Health | Self::Ready => "health",
            Self::Metrics => "metrics",
            Self::Rendezvous => "rendezvous",
            Self::List | Self::Environment(_) => "environments",
            Self::Register(_) => "register",
            Self::Connect(_) => "connect",
            Self::Validate(_) => "validate",
            Self::RegisterExecutor(_) => "register_executor",
            Self::ConnectExecutor(_) => "connect_executor",
        }
    }
}

async fn route(
    service: &Service,
    from: IpAddr,
    secure: bool,
    request: Request<Incoming>,
    permit: ConnectionPermit,
) -> (&'static str, Result<HttpResponse, ApiError>) {
    // Browsers send an Origin header; web pages must not use this API.
    if request.headers().contains_key(ORIGIN) {
        return ("refused", Err(ApiError::Origin));
    }
    match Call::parse(request.uri().path()) {
        Ok(call) => (call.label(), handle_call(service, from, secure, call, request, permit).await),
        Err(error) => ("unknown", Err(error)),
    }
}

async fn handle_call(
    service: &Service,
    from: IpAddr,
    secure: bool,
    call: Call,
    request: Request<Incoming>,
    permit: ConnectionPermit,
) -> Result<HttpResponse, ApiError> {
    let method = request.method().clone();
    let needs = match &call {
        Call::Health | Call::Ready | Call::Metrics | Call::Rendezvous | Call::List => &Method::GET,
        Call::Environment(_) if method == Method::DELETE => &Method::DELETE,
        Call::Environment(_) => &Method::GET,
        _ => &Method::POST,
    };
    if method != *needs {
        return Err(ApiError::Method);
    }
    match call {
        Call::Health => return Ok(text("ok\n")),
        Call::Ready if service.is_draining() => return Err(ApiError::Draining),
        Call::Ready => return service.registry().ready().map(|()| text("ok\n")),
        Call::Metrics => return Ok(text(service.render_metrics())),
        _ => {}
    }
    let registry = service.registry();
    let (parts, body) = request.into_parts();
    let authorization = parts.headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    let caller = Caller {
        token: authorization.and_then(bearer),
        address: from,
        websocket_base: websocket_base(service, secure, parts.headers.get(HOST)),
    };
    // While draining, only calls of connected environments and managers are served.
    let begins = !matches!(call, Call::Validate(_) | Call::List | Call::Environment(_));
    if begins && service.is_draining() {
        return Err(ApiError::Draining);
    }
    match call {
        Call::Rendezvous => {
            rendezvous(service, from, Request::from_parts(parts, body), permit).await
        }
        Call::List => {
            let environments = registry.list(&caller).await?;
            json(&ListResponse { environments })
        }
        Call::Environment(id) if method == Method::DELETE => {
            registry.remove(&caller, &id).await?;
            json(&serde_json::json!({}))
        }
        Call::Environment(id) => json(&registry.show(&caller, &id).await?),
        Call::Register(id) => json(&registry.register(&caller, &id, read(service, body)).await?),
        Call::Connect(id) => json(&registry.connect(&caller, &id, read(service, body)).await?),
        Call::Validate(id) => json(&registry.validate(&caller, &id, read(service, body)).await?),
        Call::RegisterExecutor(id) => json(&registry.register_executor(&caller, &id).await?),
        Call::ConnectExecutor(id) => json(&registry.connect_executor(&caller, &id).await?),
        Call::Health | Call::Ready | Call::Metrics => Err(ApiError::NotFound),
    }
}

/// Upgrades a request with a valid pass to a websocket.
async fn rendezvous(
    service: &Service,
    from: IpAddr,
    mut request: Request<Incoming>,
    permit: ConnectionPermit,
) -> Result<HttpResponse, ApiError> {
    let accept = websocket_accept(request.headers()).ok_or(ApiError::UpgradeRequired)?;
    let query = request.uri().query().unwrap_or_default();
    let pass = query.split('&').find_map(|pair| pair.strip_prefix("pass="));
    let seat = service.registry().seat(pass, from).await?;
    permit.authenticated();
    let upgrade = hyper::upgrade::on(&mut request);
    let hub = service.registry().hub.clone();
    let config = service.config().clone();
    service.tasks().spawn(async move {
        let _permit = permit;
        match upgrade.await {
            Ok(io) => hub.run(seat, socket::builder(&config).serve(TokioIo::new(io))).await,
            Err(error) => tracing::debug!(%error, "upgrade failed"),
        }
    });
    let mut response = Response::new(Full::default());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
    headers.insert(SEC_WEBSOCKET_ACCEPT, accept);
    Ok(response)
}

fn bearer(header: &str) -> Option<&str> {
    let (scheme, token) = header.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then_some(token.trim())
}

/// The base of websocket URLs: the public URL, or the host that the client used.
fn websocket_base(service: &Service, secure: bool, host: Option<&HeaderValue>) -> String {
    if let Some(url) = &service.config().public_url {
        return url.websocket();
    }
    let scheme = if secure { "wss" } else { "ws" };
    let host = host.and_then(|host| host.to_str().ok()?.parse::<Authority>().ok());
    let host = host.filter(|host| !host.as_str().contains('@'));
    format!("{scheme}://{}", host.as_ref().map_or("localhost", Authority::as_str))
}

/// Decodes an environment id from a path segment.
fn name(part: &str) -> Result<String, ApiError> {
    // An invalid escape leaves a `%`, which no id may contain.
    let id = percent_decode_str(part).decode_utf8().map_err(|_| ApiError::EnvironmentId)?;
    if !id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._~:@+-".contains(&byte)) {
        return Err(ApiError::EnvironmentId);
    }
    if id.is_empty() || id.len() > MAX_ID_LEN {
        return Err(ApiError::EnvironmentId);
    }
    Ok(id.into_owned())
}

/// Reads the body of a request; only after its token was checked.
async fn read<T: DeserializeOwned>(service: &Service, body: Incoming) -> Result<T, ApiError> {
    let config = service.config();
    let whole = Limited::new(body, config.body_bytes).collect();
    let whole = tokio::time::timeout(config.request_timeout, whole);
    let bytes = match whole.await {
        Ok(Ok(body)) => body.to_bytes(),
        Ok(Err(error)) if error.is::<LengthLimitError>() => return Err(ApiError::BodyTooLong),
        Ok(Err(_)) => return Err(ApiError::Body("it is incomplete")),
        Err(_) => return Err(ApiError::BodyTooSlow),
    };
    // Errors of serde may quote the body, which holds secrets.
    serde_json::from_slice(&bytes).map_err(|error| match error.classify() {
        serde_json::error::Category::Data => {
            ApiError::Body("a member is missing, unknown or not a public key")
        }
        _ => ApiError::Body("it is not JSON"),
    })
}

fn json<T: Serialize>(body: &T) -> Result<HttpResponse, ApiError> {
    let bytes = serde_json::to_vec(body).map_err(|_| ApiError::Store)?;
    let mut response = Response::new(Full::from(bytes));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    // Responses may hold secrets.
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

fn text(body: impl Into<Bytes>) -> HttpResponse {
    let mut response = Response::new(Full::new(body.into()));
    let plain = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(CONTENT_TYPE, plain);
    response
}

fn failure(error: ApiError) -> HttpResponse {
    let mut response = json(&error.body()).unwrap_or_default();
    *response.status_mut() = error.status();
    let headers = response.headers_mut();
    match error {
        ApiError::Unauthorized => {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        ApiError::Limited => {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("60"));
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        ApiError::Draining => {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        _ => {}
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::RENDEZVOUS_PATH;

    #[test]
    fn request_paths_parse_to_calls() {
        let call = |path| Call::parse(path);
        assert_eq!(call("/healthz"), Ok(Call::Health));
        assert_eq!(call(RENDEZVOUS_PATH), Ok(Call::Rendezvous));
        assert_eq!(call("/cloud/environments"), Ok(Call::List));
        assert_eq!(call("/cloud/environment/e1"), Ok(Call::Environment("e1".into())));
        assert_eq!(call("/cloud/environment/e%31/register"), Ok(Call::Register("e1".into())));
        assert_eq!(call("/cloud/executor/a.b/register"), Ok(Call::RegisterExecutor("a.b".into())));
        for bad in ["/", "", "/cloud", "/cloud/environment/e1/steal", "/healthz/x", "/rendezvous"] {
            assert_eq!(call(bad), Err(ApiError::NotFound), "{bad}");
        }
        let long = format!("/cloud/environment/{}/connect", "x".repeat(129));
        for bad in [
            "/cloud/environment//register",
            "/cloud/environment/a%2",
            "/cloud/environment/%zz",
            "/cloud/environment/a%2Fb/register",
            "/cloud/environment/a%00/connect",
            &long,
        ] {
            assert_eq!(call(bad), Err(ApiError::EnvironmentId), "{bad}");
        }
        assert_eq!(call("/cloud/environment/e1/register/more"), Err(ApiError::NotFound));
    }

    #[test]
    fn bearer_scheme_is_case_insensitive() {
        assert_eq!(bearer("Bearer abc"), Some("abc"));
        assert_eq!(bearer("bearer  abc"), Some("abc"));
        assert_eq!(bearer("Basic abc"), None);
        assert_eq!(bearer("abc"), None);
    }
}
