"""What threads share: integers that are changed in one step, by address, and kernels that are called by address."""

from numba import types
from numba.extending import intrinsic

from .emit import I64


def word(builder, address):
    """Return the LLVM pointer to the integer at `address`."""
    return builder.inttoptr(address, I64.as_pointer())


@intrinsic
def add(_, address, number):
    """Add a number, visibly after all that this thread wrote before, and return what was there."""

    def generate(context, builder, signature, arguments):
        return builder.atomic_rmw("add", word(builder, arguments[0]), arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def look(_, address):
    """Return the number, and see all that was written before it."""

    def generate(context, builder, signature, arguments):
        return builder.load_atomic(word(builder, arguments[0]), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def publish(_, address, number):
    """Store a number, visibly after all that this thread wrote before."""

    def generate(context, builder, signature, arguments):
        builder.store_atomic(arguments[1], word(builder, arguments[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def replace(_, address, old, new):
    """Return whether the number was `old`, which is then `new`."""

    def generate(context, builder, signature, arguments):
        address, old, new = arguments
        return builder.extract_value(builder.cmpxchg(word(builder, address), old, new, "acq_rel", "acquire"), 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


@intrinsic
def invoke(_, function, argument):
    """Return whether the compiled function at an address, which takes an int64 and returns nothing, has raised."""

    def generate(context, builder, signature, arguments):
        convention, parameters = context.call_conv, (types.int64,)
        kind = convention.get_function_type(types.none, parameters)
        pointer = builder.inttoptr(arguments[0], kind.as_pointer())
        status, _ = convention.call_function(builder, pointer, types.none, parameters, [arguments[1]])
        return status.is_error

    return types.boolean(types.int64, types.int64), generate
