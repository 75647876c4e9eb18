"""`python -m services.gateway`"""

from paceline.service import main
from services.gateway.gateway import body

if __name__ == "__main__":
    main("gateway", body)
