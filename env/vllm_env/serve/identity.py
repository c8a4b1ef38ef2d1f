"""Ask who answers on the ports of a tritonserver.

tritonserver binds its ports only after its models are loaded, a minute after its start. Until then
another server may take them and answer in its place. The option ``--id`` gives a tritonserver a
name, and both of its frontends tell it.
"""

import http.client
import json

_ANSWER_SECONDS = 5.0


def http_name(port: int) -> str | None:
    """Return the name of the server on an HTTP port of 127.0.0.1.

    The name is None if no program answers, and empty if the program is not a Triton.
    """
    try:
        status, body = _get(port, "/v2")
        return str(json.loads(body)["name"]) if status == http.HTTPStatus.OK else ""
    # A server that ends closes the connection. That is an HTTPException as well.
    except ConnectionError:
        return None
    # A ValueError is raised for a body that is not JSON, the others for another kind of JSON.
    except (http.client.HTTPException, ValueError, TypeError, KeyError):
        return ""
    except OSError:
        return None


def grpc_name(port: int) -> str | None:
    """Return the name of the server on a gRPC port of 127.0.0.1; None if no server answers."""
    # Only a command that serves needs it. The import takes as long as all others together.
    from tritonclient.grpc import InferenceServerClient
    from tritonclient.utils import InferenceServerException

    # docker can set http_proxy in every container, and gRPC would use it for this machine, too.
    direct = [("grpc.enable_http_proxy", 0)]
    with InferenceServerClient(f"127.0.0.1:{port}", channel_args=direct) as client:
        try:
            return str(client.get_server_metadata(client_timeout=_ANSWER_SECONDS).name)
        except InferenceServerException:
            return None


def is_ready(port: int) -> bool:
    """Return whether the server on an HTTP port says that it is ready."""
    try:
        status, _ = _get(port, "/v2/health/ready")
    except (http.client.HTTPException, OSError):
        return False
    return status == http.HTTPStatus.OK


def _get(port: int, path: str) -> tuple[int, bytes]:
    """Return the status and the body of a page on an HTTP port of 127.0.0.1.

    Raises:
        OSError: no program answers.
        HTTPException: the answer is not HTTP, or it is cut off.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWER_SECONDS)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
